"""A model as data: sizes that add up, the matrix of a layer, the file form."""

from pathlib import Path

import pytest

from poseidon.errors import ConfigError, ProfileError
from poseidon.profile.graph import ComputeRates, GradientStructure, LayerSpec, ModelProfile, TensorSpec


def layer(name: str, *shapes: tuple[int, ...], seconds: tuple[float, float] = (0.0, 0.0)) -> LayerSpec:
    parameters = []
    for number, shape in enumerate(shapes):
        count = 1
        for size in shape:
            count *= size
        parameters.append(TensorSpec(name=f"p{number}", shape=shape, num_bytes=4 * count))
    return LayerSpec(
        name=name, kind="Any", parameters=tuple(parameters), forward_seconds=seconds[0], backward_seconds=seconds[1]
    )


CONV = layer("conv", (64, 3, 11, 11), (64,), seconds=(0.25, 0.5))
FC = layer("fc", (10, 4096), (10,), seconds=(0.125, 0.0625))
NET = ModelProfile(model="net", batch_size=32, layers=(CONV, FC))


def test_bytes_add_up() -> None:
    assert CONV.num_bytes == 4 * (64 * 3 * 11 * 11 + 64)
    assert NET.num_bytes == CONV.num_bytes + FC.num_bytes
    assert ModelProfile(model="empty", batch_size=1, layers=()).num_bytes == 0


def test_seconds_add_up() -> None:
    assert NET.seconds == 0.9375


@pytest.mark.parametrize(
    ("shape", "matrix"), [((10, 4096), (10, 4096)), ((64, 3, 11, 11), (64, 363)), ((64,), (64, 1)), ((0, 5), (0, 5))]
)
def test_matrix_is_the_first_parameter_flattened_behind_its_first_dim(
    shape: tuple[int, ...], matrix: tuple[int, int]
) -> None:
    assert layer("any", shape, (7,)).matrix == matrix


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    outer = FC.model_copy(update={"structure": GradientStructure.OUTER_PRODUCT, "rows": 32})
    profile = NET.model_copy(update={"layers": (CONV, outer), "source": "measured"})
    profile.save(tmp_path / "net.json")
    profile.save(tmp_path / "net.toml")
    assert ModelProfile.load(tmp_path / "net.json") == ModelProfile.load(tmp_path / "net.toml") == profile
    assert ModelProfile.parse(profile.to_json()) == profile


def test_an_unknown_structure_names_the_layer_and_what_is_known(tmp_path: Path) -> None:
    text = NET.to_json().replace('"dense"', '"sparse"', 1)
    with pytest.raises(ConfigError, match=r"key 'layers\.0\.structure' has 'sparse': .*'outer_product'"):
        ModelProfile.parse(text)


def test_a_layer_has_no_negative_size() -> None:
    with pytest.raises(ConfigError, match=r"key 'layers\.0\.parameters\.0\.num_bytes' has -4: .* or equal to 0"):
        ModelProfile.parse(NET.to_json().replace(f'"num_bytes":{4 * 64 * 363}', '"num_bytes":-4'))


def test_a_layers_seconds_include_its_weight_gradient() -> None:
    assert FC.model_copy(update={"weight_gradient_seconds": 0.5}).seconds == 0.6875


RATES = ComputeRates(name="any", flops_per_s=1e9, memory_bandwidth=1000.0)


def test_another_batch_scales_what_depends_on_it() -> None:
    """At 1000 B/s, moving the 400 B of weights takes 0.4 s of each part; the rest doubles."""
    fc = layer("fc", (10, 10), seconds=(1.0, 0.3)).model_copy(
        update={
            "structure": GradientStructure.OUTER_PRODUCT,
            "rows": 64,
            "flops": 12_800,
            "activation_num_bytes": 2560,
            "weight_gradient_seconds": 2.4,
        }
    )
    words = layer("words", (100, 1), seconds=(1.0, 0.4)).model_copy(
        update={"structure": GradientStructure.ROWS, "rows": 60}
    )
    net = ModelProfile(model="net", batch_size=32, layers=(fc, words), device=RATES, step_seconds=5.1, source="here")
    scaled = net.scaled_to_batch(64)
    more_fc, more_words = scaled.layers
    assert (more_fc.rows, more_fc.flops, more_fc.activation_num_bytes) == (128, 25_600, 5120)
    assert more_fc.forward_seconds == pytest.approx(0.4 + 2 * 0.6)
    assert more_fc.backward_seconds == pytest.approx(0.3), "all of it is moving weights"
    assert more_fc.weight_gradient_seconds == pytest.approx(0.4 + 2 * 2.0)
    assert more_words.rows == 100, "the table has no more"
    assert (more_words.forward_seconds, more_words.backward_seconds) == pytest.approx((2.0, 0.4))
    assert scaled.batch_size == 64
    assert scaled.step_seconds == pytest.approx(scaled.seconds)
    assert scaled.source == "here; estimated from 32 to 64 samples"


def test_the_same_batch_changes_nothing_but_says_so() -> None:
    scaled = NET.scaled_to_batch(32)
    assert scaled.layers == NET.layers


def test_without_a_known_device_all_seconds_are_taken_to_grow() -> None:
    assert NET.scaled_to_batch(8).seconds == NET.seconds / 4


@pytest.mark.parametrize(("before", "after"), [(0, 8), (32, 0)])
def test_a_batch_without_samples_is_refused(before: int, after: int) -> None:
    with pytest.raises(ProfileError, match="need to be 1 or more"):
        NET.model_copy(update={"batch_size": before}).scaled_to_batch(after)
