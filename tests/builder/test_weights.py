"""Weights in blobs: cut as small as one likes, they are read back as they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine_builder.building.weights import cut, write_weights
from engine_builder.checkpoints import random_sdxl
from engine_builder.networks.network import (
    ModelFolder,
    load_network,
)
from engine_builder.networks.unet import UnetNetwork, UnetTextNetwork, UnetTimeNetwork
from model.errors import PreheatError
from model.store.store import open_store
from model.weights.cache import WeightsCache


@pytest.mark.parametrize("limit, several", [(2**20, False), (20_000, True)])
def test_weights_in_blobs_are_read_back_equal(limit: int, several: bool, toy_folder: Path, tmp_path: Path) -> None:
    network = load_network(ModelFolder(toy_folder), "unet", "fp32")
    store = open_store(tmp_path)
    record = write_weights(network, store, limit=limit)
    assert (len(record.blobs) > 1) == several
    cache = WeightsCache(store, torch.device("cpu"))
    read, tensors = cache.load(record), network.tensors()
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert cache.bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_equal_weights_are_written_and_read_once(toy_folder: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    network = load_network(ModelFolder(toy_folder), "text_encoder_2", "fp32")
    refiner = load_network(ModelFolder(toy_folder), "refiner_text_encoder_2", "fp32")
    first, second = write_weights(network, store), write_weights(refiner, store)
    assert first.blobs == second.blobs and first.component != second.component
    cache = WeightsCache(store, torch.device("cpu"))
    assert cache.load(first) is cache.load(second)


def test_groups_are_in_order_and_no_larger_than_the_limit() -> None:
    tensors = {name: torch.zeros(10) for name in "dbca"}
    groups = list(cut(tensors, limit=100))
    assert [list(group) for group in groups] == [["a", "b"], ["c", "d"]]
    with pytest.raises(PreheatError, match="d alone has 40 bytes; a weight blob holds at most 39"):
        list(cut({"d": torch.zeros(10)}, limit=39))


@pytest.mark.parametrize("wrapper", [UnetTextNetwork, UnetTimeNetwork, UnetNetwork])
@pytest.mark.parametrize("refiner", [False, True])
def test_no_tensor_of_sdxl_is_too_large_for_a_blob(wrapper: Callable[[Any], nn.Module], refiner: bool) -> None:
    with torch.device("meta"):
        network = wrapper(random_sdxl.unet(refiner))  # in fp32: its tensors are never larger
    tensors = dict(network.named_parameters())
    assert sum(len(group) for group in cut(tensors)) == len(tensors)
