"""The training at toy size on the CPU: it pauses, goes on where it was, and leaves a model diffusers can load."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers import UNet2DConditionModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from training import architecture, diffusion, export, settings, vae  # noqa: E402
from training.data import Workers  # noqa: E402
from training.learner import Learner  # noqa: E402
from training.run import PausedError, Run  # noqa: E402
from training.settings import Settings, SettingsError  # noqa: E402
from training.train import train  # noqa: E402

TINY = Path(__file__).parents[2] / "data" / "tiny-sdxl"
STEPS = 2


@pytest.fixture
def toy() -> Settings:
    diffusion = {"steps": STEPS, "batch": 2, "rate": 1e-3, "pool": 2, "fresh": 2, "wordings": 2, "auxiliary": 0.1}
    return settings.from_table(
        {
            "seed": 1,
            "workers": 0,
            "checkpoint_seconds": 1000,
            "sizes": [[64, 64, 1.0]],
            "decoder": {"steps": STEPS, "batch": 2, "rate": 1e-3},
            "vae": {"steps": STEPS, "batch": 2, "window": 32, "whole_share": 0.0, "rate": 1e-3, "kl": 1e-4},
            "base": diffusion,
            "refiner": diffusion,
        }
    )


def test_the_settings_in_data_can_be_read() -> None:
    assert settings.load(TINY / "training.toml").base.steps > 1000


def test_settings_name_what_is_wrong() -> None:
    table = tomllib.loads((TINY / "training.toml").read_text())
    with pytest.raises(SettingsError, match="vae has unknown keys: stepz"):
        settings.from_table(table | {"vae": table["vae"] | {"stepz": 1}})
    with pytest.raises(SettingsError, match="the file lacks seed"):
        settings.from_table({key: value for key, value in table.items() if key != "seed"})
    with pytest.raises(SettingsError, match="multiples of 32, not 100x256"):
        settings.from_table(table | {"sizes": [[100, 256, 1.0]]})


def test_pauses_and_goes_on(toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(vae, "SIDE", 64)
    tmp_path.mkdir(exist_ok=True)
    short = replace(toy, vae=replace(toy.vae, steps=1), refiner=replace(toy.refiner, steps=0))
    short = replace(short, decoder=replace(toy.decoder, steps=0))
    pauses = []
    for _ in range(4):
        try:
            train(Run(short, tmp_path, Workers(0), stop_after=0.0))
            break
        except PausedError:
            pauses += [(path.name, int(load_file(path)["step"])) for path in tmp_path.glob("*.state.safetensors")]
    assert pauses == [("vae.state.safetensors", 1), ("base.state.safetensors", 1), ("base.state.safetensors", 2)]
    assert not list(tmp_path.glob("*.state.safetensors"))
    trained = load_file(tmp_path / "model" / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(tensor.dtype == torch.float16 and tensor.isfinite().all() for tensor in trained.values())


def test_a_checkpoint_gives_back_weights_average_and_moments(tmp_path: Path) -> None:
    inputs = torch.randn(8, 4)

    def fresh() -> Learner:
        torch.manual_seed(1)
        return Learner(torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 4)}), steps=100, rate=1e-2)

    def update(learner: Learner) -> None:
        learner.update(learner.networks["layer"](inputs).square().mean())

    whole, first = fresh(), fresh()
    for _ in range(6):
        update(whole)
    for _ in range(3):
        update(first)
    first.save(tmp_path / "state.safetensors")
    second = fresh()
    second.load(tmp_path / "state.safetensors")
    for _ in range(3):
        update(second)
    assert second.step == whole.step == 6
    for one, other in zip(whole.weights + whole.averaged, second.weights + second.averaged, strict=True):
        assert torch.equal(one, other)


def test_centring_changes_the_latents_and_not_the_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    network = architecture.vae().eval()
    monkeypatch.setattr(vae, "SIDE", 64)
    pictures = vae.drawings(torch.rand(4, 24))
    with torch.no_grad():
        before = network.decode(network.encode(pictures).latent_dist.mean).sample
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vae, "drawings", lambda some: some)
            factor = vae.centre(network, pictures)
        latents = network.encode(pictures).latent_dist.mean
        after = network.decode(latents).sample
    assert torch.allclose(before, after, atol=1e-4)
    assert (latents * factor).mean((0, 2, 3)).abs().max() < 1e-3
    assert torch.allclose((latents * factor).std((0, 2, 3)), torch.ones(4), atol=1e-3)


def test_learns_on_from_an_exported_model(toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder stays as it was, bit for bit, and so does a network whose stage has no steps."""
    torch.set_num_threads(1)
    monkeypatch.setattr(vae, "SIDE", 64)
    first, second = tmp_path / "first", tmp_path / "second"
    export.export(export.random_networks(3), first)
    second.mkdir()
    train(Run(replace(toy, base=replace(toy.base, steps=0)), second, Workers(0)), start=first)

    def changed(name: str, part: str = "") -> bool:
        one, other = (load_file(folder / f"{name}.safetensors") for folder in (first, second / "model"))
        return any(not torch.equal(one[key], other[key]) for key in one if key.startswith(part))

    weights = "diffusion_pytorch_model"
    assert not changed(f"unet/{weights}") and not changed("text_encoder_2/model")
    assert not changed(f"vae/{weights}", "encoder.")
    assert changed(f"vae/{weights}", "decoder.") and changed(f"refiner/unet/{weights}")


def test_stages_may_be_trained_by_different_processes(
    toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(vae, "SIDE", 64)
    with pytest.raises(SystemExit, match="decoder needs what vae makes"):
        train(Run(toy, tmp_path, Workers(0)), stages=["decoder"])
    for stages in (["vae"], ["base"], ["decoder"]):
        train(Run(toy, tmp_path, Workers(0)), stages=stages)
        assert not (tmp_path / "model").exists()
    train(Run(toy, tmp_path, Workers(0)), stages=["refiner"])
    apart = load_file(tmp_path / "base.safetensors"), load_file(tmp_path / "decoder.safetensors")
    written = {
        "unet": load_file(tmp_path / "model" / "unet" / "diffusion_pytorch_model.safetensors"),
        "vae": load_file(tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"),
    }
    for name, stage in (("unet", apart[0]), ("vae", apart[1])):
        for key, tensor in written[name].items():
            assert torch.equal(stage[f"{name}.{key}"].half(), tensor), key


def test_the_refiner_learns_what_the_base_predicts(
    toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(vae, "SIDE", 64)
    monkeypatch.setattr(diffusion, "start_from_base", lambda refiner, base: None)  # nearer already, and slower to learn
    none = replace(toy, decoder=replace(toy.decoder, steps=0), base=replace(toy.base, steps=0))

    def apart(steps: int) -> float:
        """Mean squared difference of the two networks' predictions after so many steps, without a caption."""
        out = tmp_path / str(steps)
        out.mkdir()
        train(Run(replace(none, refiner=replace(toy.refiner, steps=steps, rate=3e-3)), out, Workers(0)))
        networks = export.load(out / "model")
        torch.manual_seed(0)
        noised, timesteps = torch.randn(4, 4, 8, 8), torch.tensor([10, 60, 120, 200])
        predicted = []
        for network, ids in ((networks.unet, (64, 64, 0, 0, 64, 64)), (networks.refiner_unet, (64, 64, 0, 0, 6))):
            added = {"text_embeds": torch.zeros(4, architecture.WIDTH_2), "time_ids": torch.tensor([ids] * 4)}
            text = torch.zeros(4, 77, network.config.cross_attention_dim)
            with torch.no_grad():
                predicted.append(network(noised, timesteps, text, added_cond_kwargs=added, return_dict=False)[0])
        return float((predicted[0] - predicted[1]).square().mean())

    assert apart(25) < 0.6 * apart(0)


def test_the_refiner_starts_with_what_it_shares_with_the_base() -> None:
    networks = export.random_networks(4)
    refiner, base = networks.refiner_unet, networks.unet
    alone = copy.deepcopy(refiner)
    diffusion.start_from_base(refiner, base)
    before, after, source = alone.state_dict(), refiner.state_dict(), base.state_dict()
    common = ("conv_in", "down_blocks.0", "down_blocks.1.resnets", "up_blocks.2", "time_embedding", "conv_out")
    same = [name for name in after if name.startswith(common)]
    assert same and all(torch.equal(after[name], source[name]) for name in same)
    deepest = "mid_block.resnets.0.conv1.weight"
    assert after[deepest].shape != source[deepest].shape and torch.equal(after[deepest], before[deepest])
    keys = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    assert torch.equal(after[keys], source[keys][:, architecture.WIDTH_1 :])
    above = "up_blocks.1.resnets.0.conv1.weight"  # of what comes from the deepest level, and of the skip beside it
    assert not after[above][:, :-96].any() and torch.equal(after[above][:, -96:], source[above][:, -96:])

    def embedded(network: UNet2DConditionModel, *sizes: float) -> torch.Tensor:
        told = network.add_time_proj(torch.tensor(sizes)).flatten()
        pooled = torch.linspace(-1, 1, architecture.WIDTH_2)
        return network.add_embedding.linear_1(torch.cat([pooled, told])[None])

    both = embedded(refiner, 256, 256, 0, 0, 6), embedded(refiner, 256, 256, 0, 0, 2)
    assert torch.equal(*both)  # whatever the aesthetic score is
    assert torch.allclose(both[0], embedded(base, 256, 256, 0, 0, 256, 256), atol=1e-6)
