"""A model as data: sizes that add up, the matrix of a layer, the file form."""

from pathlib import Path

import pytest

from poseidon.errors import ConfigError
from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile, TensorSpec


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
