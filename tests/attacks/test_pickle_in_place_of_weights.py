"""A pickle runs what its writer likes when it is opened; weights are safetensors and nothing else."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from model.errors import CorruptBlob
from tests.attacks.conftest import Victim, everywhere

pytestmark = everywhere


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.unlink, (str(self.path),)


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_it_is_not_opened(victim: Victim, outside: Path, kind: str, tmp_path: Path) -> None:
    if kind == "pickle":
        data = pickle.dumps(Payload(outside))
    else:
        path = tmp_path / "inside" / "weights.pt"
        torch.save({"a": Payload(outside)}, path)
        data = path.read_bytes()
    victim.entries["weights"][2]["blobs"] = [victim.keep(data)]
    victim.refused(CorruptBlob, "is no safetensors file of weights")
    assert outside.exists()
