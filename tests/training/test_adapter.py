"""The training of an adapter writes a file that the tiny model accepts, and its scenes show the new colour."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_builder.adapters.add import release_layers
from engine_builder.adapters.read import open_adapter, read_changes
from engine_builder.stores.store import WritableStore
from tests.support.repository import MODEL_FOLDER
from training.autoencoder import render_images
from training.pictures.dataset import encode_caption
from training.train_adapter import COLOUR_SHARE, colour_share, sample_scenes, train, write

pytestmark = pytest.mark.full


def test_scenes_show_and_name_the_colour() -> None:
    scenes = sample_scenes(random.Random(1), 30)
    images = ((render_images(scenes.vectors, (96, 96)).permute(0, 2, 3, 1) + 1) * 127.5).round().byte().numpy()
    shows = [colour_share(image) > 0.004 for image in images]  # small objects too
    assert sum(shows) == round(COLOUR_SHARE * 30)
    pink = {token for token in encode_caption("pink") if token not in encode_caption("")}
    names = [pink <= set(ids.tolist()) for ids in scenes.ids]
    assert [shown for shown, named in zip(shows, names, strict=True) if named] == [True] * sum(names)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_writes_an_adapter_of_the_model(store: WritableStore, release: str, tmp_path: Path) -> None:
    layers = train(MODEL_FOLDER, rank=2, batch=2, rate=1e-2, seconds=2, side=64)
    assert all(bool(layer.up.any()) for layer in layers.values())
    write(layers, tmp_path / "pink.safetensors")
    known = release_layers(store, store.read_release(release))
    factors = read_changes(open_adapter(tmp_path / "pink.safetensors"), known)
    assert {name.removeprefix("unet.") for name in factors} == layers.keys()
    assert {len(entry.parts["down"]) for entry in factors.values()} == {2}
    assert all(tensor.dtype == torch.float16 for tensor in load_file(tmp_path / "pink.safetensors").values())
