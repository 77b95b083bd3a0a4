"""Weights: stored once, in blobs of limited size, and read back unchanged."""

from pathlib import Path

import pytest
import torch

from engine_builder.building.weights import group_tensors, write_weights
from engine_builder.checkpoints import random_models
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import load_network
from engine_builder.networks.unet import StepUnet, UnetTextNetwork, UnetTimeNetwork
from engine_builder.stores.store import open_writable_store
from model.errors import PreheatError
from model.store.precision import FP32
from model.weights.cache import WeightsCache


@pytest.mark.parametrize("limit, several", [(2**20, False), (20_000, True)], ids=["one blob", "several blobs"])
def test_reads_back_equal_weights(limit: int, several: bool, toy_folder: Path, tmp_path: Path) -> None:
    network = load_network(Checkpoint(toy_folder), "unet", FP32)
    store = open_writable_store(tmp_path)
    record = write_weights(network, store, limit=limit)
    assert (len(record.blobs) > 1) == several
    cache = WeightsCache(store, torch.device("cpu"))
    read, tensors = cache.load(record), network.tensors()
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert cache.bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_writes_and_reads_equal_weights_once(toy_folder: Path, tmp_path: Path) -> None:
    store = open_writable_store(tmp_path)
    network = load_network(Checkpoint(toy_folder), "text_encoder_2", FP32)
    refiner = load_network(Checkpoint(toy_folder), "refiner_text_encoder_2", FP32)
    first, second = write_weights(network, store), write_weights(refiner, store)
    assert first.blobs == second.blobs and first.component != second.component
    cache = WeightsCache(store, torch.device("cpu"))
    assert cache.load(first) is cache.load(second)


def test_groups_are_ordered_and_within_the_limit() -> None:
    tensors = {name: torch.zeros(10) for name in "dbca"}
    groups = list(group_tensors(tensors, limit=100))
    assert [list(group) for group in groups] == [["a", "b"], ["c", "d"]]
    with pytest.raises(PreheatError, match="d has 40 bytes; a blob of weights holds at most 39"):
        list(group_tensors({"d": torch.zeros(10)}, limit=39))


def test_every_tensor_of_sdxl_fits_into_a_blob() -> None:
    for unet in ("unet", "refiner_unet"):
        for wrapper in (UnetTextNetwork, UnetTimeNetwork, StepUnet):
            with torch.device("meta"):
                network = wrapper(random_models.make_network(unet))  # in fp32, where tensors are largest
            tensors = dict(network.named_parameters())
            assert sum(len(group) for group in group_tensors(tensors)) == len(tensors)
