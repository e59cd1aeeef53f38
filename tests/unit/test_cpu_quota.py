"""A host's part of the processors: what is granted, where control groups are found, what is said where they are not."""

import os
from pathlib import Path

import pytest

from poseidon.cluster import cpu_quota
from poseidon.cluster.cpu_quota import Hierarchy, find_hierarchy, make_cpu_group, quota_and_period
from poseidon.cluster.spec import ClusterSpec, limit_cpus
from poseidon.errors import ClusterError, ConfigError


@pytest.mark.parametrize(
    ("cores", "quota", "period"),
    [(0.4, 4_000, 10_000), (0.1, 1_000, 10_000), (0.02, 1_000, 50_000), (1.0, 10_000, 10_000), (2.5, 25_000, 10_000)],
)
def test_small_parts_are_granted_over_a_longer_period(cores: float, quota: int, period: int) -> None:
    assert quota_and_period(cores) == (quota, period)


def test_less_than_the_kernel_grants_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"0\.05% of a core: the kernel grants 0\.1% or more"):
        quota_and_period(0.0005)


def test_version_1_is_found_by_its_controller(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "job" / "mine").mkdir(parents=True)
    mounts = (
        f"cgroup {tmp_path}/memory cgroup rw,memory 0 0\ncgroup {tmp_path}/cpu cgroup rw,cpu,cpuacct 0 0\n"
        f"cgroup2 {tmp_path}/unified cgroup2 rw 0 0\n"
    )
    found = find_hierarchy(mounts, "4:memory:/elsewhere\n3:cpu,cpuacct:/job/mine\n0::/\n")
    assert found == Hierarchy(1, (tmp_path / "cpu/job/mine", tmp_path / "cpu/job", tmp_path / "cpu"))


def test_version_2_is_used_where_it_has_the_processors(tmp_path: Path) -> None:
    (tmp_path / "user.slice").mkdir()
    found = find_hierarchy(f"cgroup2 {tmp_path} cgroup2 rw,nsdelegate 0 0\n", "0::/user.slice\n")
    assert found == Hierarchy(2, (tmp_path / "user.slice", tmp_path))


def test_a_container_sees_only_the_root_of_its_groups(tmp_path: Path) -> None:
    found = find_hierarchy(f"cgroup2 {tmp_path} cgroup2 ro 0 0\n", "0::/../../docker/4f2a\n")
    assert found is not None
    assert tmp_path in found.folders


def test_nothing_is_found_where_nothing_is_mounted() -> None:
    assert find_hierarchy("proc /proc proc rw 0 0\n", "0::/\n") is None


class FakeKernel:
    """Folders in which a new group has the files that the kernel would put there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.enabled: set[Path] = set()
        self.files: dict[Path, tuple[str, ...]] = {}
        mounts, own = root.parent / "mounts", root.parent / "own"
        mounts.write_text(f"cgroup2 {root} cgroup2 rw 0 0\n")
        own.write_text("0::/\n")
        monkeypatch.setattr(cpu_quota, "_MOUNTS", mounts)
        monkeypatch.setattr(cpu_quota, "_OWN_GROUPS", own)
        monkeypatch.setattr(cpu_quota.tempfile, "mkdtemp", self.make)
        self.names: tuple[str, ...] = ("cpu.max",)

    def make(self, prefix: str, dir: Path) -> str:
        folder = dir / f"{prefix}0"
        folder.mkdir()
        for name in self.names:
            (folder / name).touch()
        return str(folder)


def test_version_2_gets_quota_and_period_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "groups"
    root.mkdir()
    FakeKernel(root, monkeypatch)
    folder = make_cpu_group("host2", 0.1)
    assert folder == root / f"poseidon-{os.getpid()}-host2-0"
    assert (folder / "cpu.max").read_text() == "1000 10000"


def test_version_2_without_the_controller_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "groups"
    root.mkdir()
    FakeKernel(root, monkeypatch).names = ()
    with pytest.raises(ClusterError, match=r"limit host2 to 10% of a core: writing '\+cpu' to .*No such file.*be root"):
        make_cpu_group("host2", 0.1)
    assert list(root.iterdir()) == []


def test_a_system_without_control_groups_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeKernel(tmp_path / "groups", monkeypatch)
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    with pytest.raises(ClusterError, match=r"limit host2 to 10% of a core: no group is mounted; .*be root"):
        make_cpu_group("host2", 0.1)


def test_groups_of_processes_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "groups"
    gone = root / "poseidon-999999999-host0-a"
    present = root / f"poseidon-{os.getpid()}-host0-b"
    others = root / "user.slice"
    for folder in (gone, present, others):
        folder.mkdir(parents=True)
    FakeKernel(root, monkeypatch)
    make_cpu_group("host1", 0.5)
    assert not gone.exists()
    assert present.exists()
    assert others.exists()


def test_options_limit_every_host_and_single_ones() -> None:
    spec = ClusterSpec.uniform(num_hosts=3, bandwidth="1Gbit/s")
    assert [host.cpu for host in limit_cpus(spec, []).hosts] == [None, None, None]
    assert [host.cpu for host in limit_cpus(spec, ["host1=25%", "1cores"]).hosts] == [1.0, 0.25, 1.0]
    assert [host.cpu for host in limit_cpus(spec, ["host2=10%"]).hosts] == [None, None, 0.1]


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        (["40"], ConfigError, "use one of the units %, cores"),
        (["0%"], ConfigError, "above zero"),
        (["host1=10%", "host1=20%"], ConfigError, "host1 already has 10%"),
        (["40%", "20%"], ConfigError, "every host already has 40%"),
        (["host7=10%"], ClusterError, "no host is named 'host7'"),
    ],
)
def test_options_that_cannot_be_used(texts: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        limit_cpus(ClusterSpec.uniform(num_hosts=2, bandwidth="1Gbit/s"), texts)


def test_a_file_may_limit_a_host() -> None:
    spec = ClusterSpec.parse('hosts = [{name="a", link="1Gbit/s", cpu="40%"}, {name="b", link="1Gbit/s"}]', toml=True)
    assert [host.cpu for host in spec.hosts] == [0.4, None]
