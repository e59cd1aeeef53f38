"""The built-in tasks: published sizes, a loss that falls, counts that add up."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from poseidon.errors import ConfigError
from poseidon.tasks import CLASSIFICATION, TASKS, Samples, Task, TaskData, load_task
from poseidon.tasks.models import GPT, VGG19, AlexNet, ResNet20
from poseidon.tasks.recsys import TableSizes
from poseidon.tasks.synthetic import PlantedSamples
from poseidon.tasks.text import TextWindows, _read_library

SMALL: dict[str, dict[str, object]] = {
    "fashion-mnist": {"data": "embedded", "width": 0.125},
    "alexnet": {"width": 0.125, "image_size": 64, "num_classes": 10, "dropout": 0.0},
    "vgg19": {"width": 0.125, "image_size": 32, "num_classes": 10, "dropout": 0.0},
    "vgg19-22k": {"width": 0.03, "image_size": 32, "dropout": 0.0},
    "resnet20": {"width": 4, "image_size": 16},
    "resnet50": {"width": 4, "image_size": 32, "num_classes": 10},
    "fc-heavy": {"num_features": 64, "hidden": 32, "num_classes": 10},
    "gpt-mini": {"context": 16, "width": 32, "num_layers": 2, "num_characters": 50_000},
    "recsys": {"scale": 0.001, "width": 8},
}
LARGE = ("vgg19-22k", "vgg19", "resnet50", "alexnet")
PARAMETERS = {
    "fashion-mnist": 9_606_026,
    "alexnet": 61_100_840,
    "vgg19": 143_667_240,
    "vgg19-22k": 229_052_817,
    "resnet20": 272_474,
    "resnet50": 25_557_032,
    "fc-heavy": 58_631_144,
    "gpt-mini": 3_225_088,
    "recsys": 17_666_049,
}


def small(name: str) -> Task:
    torch.manual_seed(0)
    return load_task(name, **SMALL[name])


def first_batch(task: Task, data: Samples, num_samples: int = 16) -> list[torch.Tensor]:
    return list(task.collate([data[index] for index in range(num_samples)]))


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", TASKS)
def test_a_model_has_its_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = load_task(name).make_model()
    assert count_parameters(model) == PARAMETERS[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in LARGE else name for name in TASKS]
)
def test_training_on_one_batch_lowers_its_loss(name: str) -> None:
    task = small(name)
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters())
    batch = first_batch(task, task.make_train_data())
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert min(losses[-2:]) < losses[0]


@pytest.mark.thorough
@pytest.mark.slow
def test_alexnet_learns_at_its_published_size() -> None:
    torch.manual_seed(0)
    task = load_task("alexnet")
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters())
    data = task.make_train_data()
    losses = []
    for start in range(0, 80, 8):
        optimizer.zero_grad()
        loss = task.loss(model, task.collate([data[start + index] for index in range(8)]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses[-3:]) < losses[0]


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_is_the_mean_over_the_samples(name: str) -> None:
    task = small(name)
    model = task.make_model().eval()
    batch = first_batch(task, task.make_train_data(), 6)
    parts = [[tensor[:2] for tensor in batch], [tensor[2:] for tensor in batch]]
    first, second = (task.loss(model, part).item() for part in parts)
    assert task.loss(model, batch).item() == pytest.approx((2 * first + 4 * second) / 6, rel=1e-4)


@pytest.mark.parametrize("name", TASKS)
def test_counts_of_batches_add_up(name: str) -> None:
    task = small(name)
    model = task.make_model().eval()
    batch = first_batch(task, task.make_test_data(), 6)
    whole = task.evaluate(model, batch)
    first = task.evaluate(model, [tensor[:1] for tensor in batch])
    rest = task.evaluate(model, [tensor[1:] for tensor in batch])
    assert whole["samples"].item() == 6
    assert whole["loss_sum"].item() == pytest.approx(6 * task.loss(model, batch).item(), rel=1e-4)
    assert not whole["loss_sum"].requires_grad
    for name_of_count, count in whole.items():
        assert count.shape == ()
        assert count.item() == pytest.approx(first[name_of_count].item() + rest[name_of_count].item(), rel=1e-4)
    figures = task.score({name_of_count: count.item() for name_of_count, count in whole.items()})
    assert 0 <= figures[task.metric] <= 1


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_the_same_each_time(name: str) -> None:
    task = small(name)
    for make in (task.make_train_data, task.make_test_data):
        once, again = make(), make()
        assert len(once) == len(again) > 32
        last = len(once) - 1
        assert all(torch.equal(x, y) for x, y in zip(once[last], again[last], strict=True))
    train, test = first_batch(task, task.make_train_data(), 4), first_batch(task, task.make_test_data(), 4)
    assert not torch.equal(train[0], test[0])


@pytest.mark.parametrize("name", TASKS)
def test_the_note_says_whether_the_samples_are_real(name: str) -> None:
    assert small(name).note.startswith(("real ", "synthetic "))


@pytest.mark.parametrize("name", TASKS)
def test_the_caller_seeds_the_model(name: str) -> None:
    one, same = small(name).make_model(), small(name).make_model()
    assert all(torch.equal(x, y) for x, y in zip(one.parameters(), same.parameters(), strict=True))


def test_each_task_has_its_row_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert rows == list(TASKS)


def test_an_unknown_name_gets_the_closest_one_and_all() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'vgg19'\?") as caught:
        load_task("vgg-19")
    assert all(name in str(caught.value) for name in TASKS)


def test_a_name_like_no_other_gets_no_guess() -> None:
    with pytest.raises(ConfigError, match=r"cannot find a task 'zzz': known are fashion-mnist, "):
        load_task("zzz")


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"task 'vgg19': .*'size'.*image_size"):
        load_task("vgg19", size=32)


@pytest.mark.parametrize(
    ("field", "value"), [("batch_size", 0), ("batch_size", 1.5), ("epochs", 0), ("name", ""), ("note", "")]
)
def test_a_task_checks_itself(field: str, value: object) -> None:
    fields: dict[str, object] = {
        "name": "mine",
        "note": "synthetic",
        "make_model": nn.Identity,
        "make_optimizer": torch.optim.SGD,
        "objective": CLASSIFICATION,
        "data": TaskData(make_train=list, make_test=list),
        "batch_size": 1,
    }
    with pytest.raises(ConfigError, match=field):
        Task(**{**fields, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AlexNet(image_size=62), "62 pixels"),
        (lambda: VGG19(image_size=48), "48 pixels"),
        (lambda: GPT(width=30, num_heads=4), "30 features"),
    ],
)
def test_a_model_refuses_sizes_it_cannot_have(make: type, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "share"), [("alexnet", 0.95), ("vgg19", 0.86), ("vgg19-22k", 0.91), ("resnet50", 0.09)]
)
def test_fully_connected_layers_hold_the_published_share(name: str, share: float) -> None:
    with torch.device("meta"):
        model = load_task(name).make_model()
    linear = sum(count_parameters(module) for module in model.modules() if type(module) is nn.Linear)
    assert linear / PARAMETERS[name] > share - 0.015


@pytest.mark.parametrize("model", [AlexNet, VGG19])
def test_dropout_is_there_unless_it_is_turned_off(model: type[AlexNet] | type[VGG19]) -> None:
    with torch.device("meta"):
        rates = [module.p for module in model().modules() if isinstance(module, nn.Dropout)]
    assert rates == [0.5, 0.5]


def test_resnet20_halves_its_images_twice() -> None:
    model = ResNet20(width=4)
    assert model.blocks(model.stem(torch.zeros(2, 3, 32, 32))).shape == (2, 16, 8, 8)


def test_planted_labels_use_at_most_ten_classes_and_several() -> None:
    data = PlantedSamples((3, 16, 16), num_classes=1000, num_samples=200, seed=1)
    labels = {int(data[index][1]) for index in range(200)}
    assert 5 <= len(labels) <= 10
    assert max(labels) < 10


def test_planted_labels_are_linear_in_the_sample() -> None:
    train, test = (PlantedSamples((64,), num_classes=4, num_samples=500, seed=seed) for seed in (1, 2))
    inputs, labels = (torch.stack(column) for column in zip(*(train[i] for i in range(500)), strict=True))
    weights = torch.linalg.lstsq(inputs, nn.functional.one_hot(labels, 4).float()).solution
    correct = sum(int((inputs @ weights).argmax()) == int(label) for inputs, label in (test[i] for i in range(500)))
    assert correct > 350


def test_a_bank_that_does_not_fit_is_gone_through_again() -> None:
    data = PlantedSamples((8,), num_classes=2, num_samples=10, seed=1, bank_bytes=3 * 8 * 4)
    assert len(data) == 10
    assert torch.equal(data[1][0], data[4][0])
    assert not torch.equal(data[1][0], data[2][0])


def test_a_planted_index_beyond_the_end_is_an_index_error() -> None:
    data = PlantedSamples((8,), num_classes=2, num_samples=10, seed=1)
    with pytest.raises(IndexError):
        data[10]


def test_windows_cover_the_text_and_targets_are_one_further() -> None:
    data = TextWindows(torch.arange(100, dtype=torch.uint8), context=8)
    assert len(data) == 12
    characters, targets = data[11]
    assert characters.tolist() == list(range(88, 96))
    assert targets.tolist() == list(range(89, 97))
    with pytest.raises(IndexError):
        data[12]


def test_a_text_no_longer_than_a_window_has_no_samples() -> None:
    assert len(TextWindows(torch.zeros(8, dtype=torch.uint8), context=8)) == 0


def test_the_library_is_read_in_the_order_of_names_without_tests(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("b = 'ü'")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_text("z")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "x.py").write_text("x")
    assert bytes(_read_library(tmp_path, 9).tolist()) == b"zb = '??'"


def test_a_library_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read 10 characters .* found 0"):
        _read_library(tmp_path, 10)


def test_a_character_sees_only_what_came_before() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary_size=16, context=8, width=16, num_layers=2, num_heads=2).eval()
    characters = torch.arange(8).unsqueeze(0)
    changed = characters.clone()
    changed[0, 5] = 15
    before, after = model(characters), model(changed)
    assert torch.allclose(before[0, :5], after[0, :5], atol=1e-6)
    assert not torch.allclose(before[0, 5:], after[0, 5:], atol=1e-6)


def test_the_output_layer_of_gpt_is_its_input_embedding() -> None:
    model = GPT(width=16, num_layers=1)
    assert model.head.weight is model.characters.weight


def test_tables_of_recsys_are_heavy_and_one_is_sparse() -> None:
    with torch.device("meta"):
        tables = [module for module in load_task("recsys").make_model().modules() if hasattr(module, "sparse")]
    num_bytes = 4 * sum(count_parameters(table) for table in tables)
    assert 60e6 < num_bytes < 100e6
    assert [table.sparse for table in tables] == [False, True, False, False]


def test_scaled_tables_keep_a_few_rows() -> None:
    assert TableSizes().scaled(1e-6) == TableSizes(users=8, items=8, history=8, contexts=8)


def test_clicks_can_be_told_from_the_ids() -> None:
    task = small("recsys")
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters())
    train, test = task.make_train_data(), task.make_test_data()
    for start in range(0, 12_800, 128):
        optimizer.zero_grad()
        task.loss(model, task.collate([train[start + index] for index in range(128)])).backward()
        optimizer.step()
    batch = first_batch(task, test, 1000)
    base_rate = max(batch[2].mean().item(), 1 - batch[2].mean().item())
    assert 0.4 < base_rate < 0.6
    assert task.evaluate(model, batch)["correct"].item() / 1000 > base_rate + 0.1


def test_sums_over_any_split_score_the_same() -> None:
    task = small("fc-heavy")
    model = task.make_model().eval()
    batch = first_batch(task, task.make_test_data(), 12)
    scores = []
    for splits in ([12], [5, 7], [1, 1, 10]):
        counts: dict[str, float] = {}
        for start, size in zip(itertools.accumulate([0, *splits[:-1]]), splits, strict=True):
            for name, count in task.evaluate(model, [tensor[start : start + size] for tensor in batch]).items():
                counts[name] = counts.get(name, 0) + count.item()
        scores.append(task.score(counts))
    assert scores[0] == pytest.approx(scores[1])
    assert scores[0] == pytest.approx(scores[2])
