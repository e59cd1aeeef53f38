"""`poseidon plan` and `poseidon simulate` on a profile's file: what they print, write and refuse."""

import importlib

import pytest
from typer.testing import CliRunner

from poseidon.cli.main import app
from poseidon.cli.plan import read_overrides
from poseidon.cluster.spec import ClusterSpec
from poseidon.errors import ConfigError, InfeasibleError, PoseidonError
from poseidon.plan import Plan
from poseidon.profile.graph import ModelProfile
from poseidon.report import speedup
from poseidon.timeline import Timeline
from support.models_as_data import dense, linear, model

LAYERS = [dense("conv", 4_000_000, forward=0.02, backward=0.04), linear("fc", 1000, 1000, rows=32, seconds=0.005)]


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "model.json"
    model(LAYERS, optimizer=0.01).save(path)
    return str(path)


def run(*arguments):
    """Output of a command that succeeds; what it raises if it does not."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and done.exit_code == 1 and isinstance(done.exception.__context__, PoseidonError):
        raise done.exception.__context__
    assert done.exit_code == 0, done.output
    return done.output


def test_hosts_links_and_batches_are_compared(profile):
    output = run("plan", profile, "--hosts", "1,2,4", "--links", "1Mbit/s,10Gbit/s", "--batch", "16,32")
    rows = [line.split() for line in output.splitlines() if line.split()[1:2] in (["1Mbit/s"], ["10Gbit/s"])]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (hosts, link, batch) for batch in ("16", "32") for link in ("1Mbit/s", "10Gbit/s") for hosts in ("1", "2", "4")
    ]
    assert "at 1Mbit/s, stay on one host with 16 samples a rank" in output
    assert "at 10Gbit/s, 4 hosts with 32 samples a rank are best" in output
    assert max(map(len, output.splitlines())) <= 80


def test_the_plan_of_the_only_number_of_hosts_is_explained_and_written(profile, tmp_path):
    output = run("plan", profile, "--hosts", "4", "--links", "100Mbit/s", "-o", tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.world_size == 4
    assert plan.predicted is not None
    assert "the plan for 4 hosts at 100Mbit/s with 32 samples a rank" in output
    assert "fc by sufficient_factor" in output
    assert "the bottleneck is the link" in output
    assert "twice the bandwidth" in output


def test_what_is_set_is_in_the_plan(profile, tmp_path):
    given = ["--set", "layers.fc.scheme=all_reduce", "--set", "wait_free=false"]
    run("plan", profile, "--hosts", "2", "--links", "1Gbit/s", *given, "-o", tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.is_plain
    assert not plan.wait_free


def test_a_plan_is_simulated_on_its_cluster_and_refused_on_another(profile, tmp_path):
    path = tmp_path / "plan.json"
    run("plan", profile, "--cluster", "lab-4x1GbE", "--hosts", "4", "-o", path)
    output = run("simulate", path, "--cluster", "lab-4x1GbE", "--steps", "4", "--timeline", tmp_path / "steps.jsonl")
    assert "predicted step" in output
    assert "the bottleneck is" in output
    assert [step.index for step in Timeline.load(tmp_path / "steps.jsonl").steps] == [0, 1, 2, 3]
    with pytest.raises(InfeasibleError, match="is for a world size of 4, but gpu-8x10GbE has 8 ranks"):
        run("simulate", path, "--cluster", "gpu-8x10GbE")
    assert "over 4 ranks" in run("simulate", path, "--cluster", "gpu-8x10GbE", "--hosts", "4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing is known about the hosts"),
        (["--hosts", "two", "--links", "1Gbit/s"], "cannot read 'two' as a number of hosts or samples"),
        (["--hosts", "2", "--links", "fast"], "cannot read 'fast' as a link rate"),
        (["--hosts", "2", "--links", "1Gbit/s", "--set", "fc"], "write it like layers.fc6.scheme=all_reduce"),
        (["--hosts", "2", "--links", "1Gbit/s", "--set", "layers.fc6.scheme=all_reduce"], "there are 'conv', 'fc'"),
        (["--hosts", "2", "--links", "1Gbit/s", "--plot", "out.pdf"], "the name must end in .html or .png"),
        (["--hosts", "2", "--links", "1Gbit/s", "-o", "/no/such/folder/plan.json"], "there is no folder"),
        (["--cluster", "lab-4x1GbE", "--hosts", "5"], "this cluster has 4"),
        (["--cluster", "moon"], "no preset is named 'moon'"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(profile, arguments, message):
    with pytest.raises(PoseidonError) as error:
        run("plan", profile, *arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_without_seconds_is_no_base_for_a_plan(tmp_path):
    bare = ModelProfile(model="Net", batch_size=1, layers=(dense("conv", 4),))
    bare.save(tmp_path / "bare.json")
    with pytest.raises(ConfigError, match="its layers have no seconds"):
        run("plan", tmp_path / "bare.json", "--hosts", "2", "--links", "1Gbit/s")


def test_a_key_is_set_once():
    assert read_overrides(["x=y=z"]) == {"x": "y=z"}
    with pytest.raises(ConfigError, match="cannot set 'a' twice"):
        read_overrides(["a=1", "a=2"])


# Pictures


def test_pictures_are_files_that_need_no_network(profile, tmp_path):
    for name in ("speedup.png", "speedup.html"):
        run("plan", profile, "--hosts", "1,2", "--links", "10Mbit/s,1Gbit/s", "--plot", tmp_path / name)
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "speedup.html").read_text(encoding="utf-8")
    assert "10Mbit" in page
    assert 'src="http' not in page


@pytest.mark.parametrize(("name", "package"), [("a.html", "plotly"), ("a.png", "matplotlib")])
def test_a_missing_package_is_named_with_its_extra(name, package, tmp_path, monkeypatch):
    def refuse(module):
        if module.startswith(package):
            raise ImportError(module)
        return importlib.import_module(module)

    monkeypatch.setattr(speedup, "import_module", refuse)
    with pytest.raises(ConfigError, match=rf"cannot draw without {package}.*poseidon-dl\[report\]"):
        speedup.check_plot(tmp_path / name)


def test_passes_are_accumulated_where_that_is_asked_for(profile, tmp_path):
    output = run("plan", profile, "--hosts", "4", "--links", "1Gbit/s", "--accumulate", "64", "-o", tmp_path / "p.json")
    plan = Plan.load(tmp_path / "p.json")
    assert plan.profile.accumulate == 64
    assert plan.schemes["fc"].kind == "all_reduce"
    assert "64 backward passes to one exchange" in " ".join(output.split())
    assert f"{64 * 32} samples a rank" in " ".join(output.split())
    cluster = tmp_path / "lab.toml"
    ClusterSpec.uniform(num_hosts=4, bandwidth=1.25e8).save(cluster)

    def rate(*options):
        line = next(
            x
            for x in run("simulate", tmp_path / "p.json", "--cluster", cluster, *options).splitlines()
            if "samples/s" in x
        )
        return float(line.split()[0].replace(",", ""))

    assert rate() == rate("--accumulate", "64")
    assert rate("--accumulate", "1") < rate(), "an exchange after every pass"
