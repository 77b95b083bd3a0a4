"""The memory of the weights that adapters change."""

from pathlib import Path

import pytest
import torch

from engine_builder.stores.local import WritableLocalStore
from model.deployment import ServedAdapters
from model.errors import OutOfDeviceMemory
from model.loading.adapters import open_library
from model.pipeline.spec import UNET


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_copies_that_fit_nowhere_are_refused(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    monkeypatch.setattr("model.loading.adapters.free_host_memory", lambda: 100)
    weights = {UNET: [{"mid_block.attentions.0.proj_in.weight": torch.ones(8, 8)}]}
    with pytest.raises(OutOfDeviceMemory, match="this machine has 0.0 GiB free"):
        store, adapters = WritableLocalStore(tmp_path), ServedAdapters(("*",))
        open_library(store, [], weights, None, "toy/1", torch.device(device), adapters)
