"""Files of LoRA adapters: which key formats, folders and types are read, and what of a file is left out.

The files in `cases` are like those of public bug reports, with random tensors for the tiny model. No store is needed:
the layers are those of the tiny model's networks.
"""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_builder.adapters.bad_adapter import FORMATS, BadAdapter
from engine_builder.adapters.names import LayerNames
from engine_builder.adapters.offline import read_merge
from engine_builder.adapters.read import open_adapter, read_changes
from engine_builder.checkpoints.folder import Checkpoint
from model.adapters.changes import Change
from model.adapters.layers import Layer
from preheat.commands.build_arguments import parse_plan
from tests.support.adapters import CONVOLUTIONS, LINEARS, Delta, module_shapes, random_deltas, sgm_name
from tests.support.lycoris_adapters import ALGORITHMS, LycorisAdapter
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

CASES = Path(__file__).parent / "cases"
ATTENTION = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
Rename = Callable[[str], str]


@pytest.fixture(scope="module")
def layers() -> dict[str, Layer]:
    shapes = module_shapes(MODEL_FOLDER)
    return {name: Layer(name, shape, name.partition(".")[0], name) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def deltas(layers: dict[str, Layer]) -> dict[str, Delta]:
    pattern = re.compile(f"{LINEARS.pattern}|{CONVOLUTIONS.pattern}|text_encoder_2.text_projection")
    return random_deltas({name: layer.shape for name, layer in layers.items()}, pattern, 4, seed=1)


@pytest.fixture
def written(deltas: dict[str, Delta], tmp_path: Path) -> Path:
    """A file in the keys of kohya's scripts, dotted."""
    return write(tmp_path / "a.safetensors", deltas, lambda name: name)


def write(
    path: Path,
    deltas: dict[str, Delta],
    rename: Rename,
    ends: tuple[str, str] = (".lora_down.weight", ".lora_up.weight"),
) -> Path:
    """Write factors and alphas under the names that `rename` gives to the modules."""
    tensors = {}
    for name, (down, up, alpha) in deltas.items():
        up = up.reshape(*up.shape, *(1,) * (down.ndim - 2))
        tensors |= {f"{rename(name)}{ends[0]}": down, f"{rename(name)}{ends[1]}": up}
        tensors[f"{rename(name)}.alpha"] = torch.tensor(alpha)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return path


def prefixes(unet: str, text_encoder: str, text_encoder_2: str) -> Rename:
    """Return the renaming of components, where each prefix has its separator."""
    starts = {"unet": unet, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2}

    def rename(name: str) -> str:
        component, _, module = name.partition(".")
        return starts[component] + module

    return rename


def original(rename: Rename) -> Rename:
    """Name the UNet's blocks as Stability AI's code does."""
    return lambda name: rename(sgm_name(name) if name.startswith("unet.") else name)


def without_text_model(rename: Rename) -> Rename:
    return lambda name: rename(name.replace(".text_model.", "."))


COMFY = prefixes("diffusion_model.", "text_encoders.clip_l.transformer.", "text_encoders.clip_g.transformer.")
FORMS: dict[str, Rename] = {
    "OneTrainer, original": original(prefixes("unet.", "clip_l.", "clip_g.")),
    "OneTrainer, diffusers": prefixes("lora_unet.", "lora_te1.", "lora_te2."),
    "OneTrainer, original without prefix": original(prefixes("", "text_encoder.", "text_encoder_2.")),
    "OneTrainer, transformers 5": without_text_model(prefixes("unet.", "text_encoder.", "text_encoder_2.")),
    "ComfyUI": original(COMFY),
    "ComfyUI, transformers 5": original(without_text_model(COMFY)),
    "ComfyUI without transformer": original(
        prefixes("diffusion_model.", "text_encoders.clip_l.", "clip_g.transformer.")
    ),
    "a checkpoint's prefix": original(prefixes("model.diffusion_model.", "lora_te.", "lora_te2.")),
    "kohya, flat": lambda name: prefixes("lora_unet.", "lora_te1.", "lora_te2.")(name).replace(".", "_"),
    "PEFT": prefixes("base_model.model.", "base_model.model.text_encoder.", "base_model.model.text_encoder_2."),
    "PEFT, inside": prefixes("unet.base_model.model.", "text_encoder.base_model.model.", "text_encoder_2."),
}


def assert_equal(factors: dict[str, Change], deltas: dict[str, Delta]) -> None:
    assert factors.keys() == deltas.keys()
    for name, (down, up, alpha) in deltas.items():
        assert torch.equal(factors[name].parts["down"].flatten(1), down.flatten(1)) and torch.equal(
            factors[name].parts["up"], up
        )
        assert factors[name].scale == alpha / len(down)


@pytest.mark.parametrize("ends", [(".lora_down.weight", ".lora_up.weight"), (".lora_A.weight", ".lora_B.weight")])
def test_reads_keys_of_each_program(
    ends: tuple[str, str], deltas: dict[str, Delta], layers: dict[str, Layer], tmp_path: Path
) -> None:
    for program, rename in FORMS.items():
        file = open_adapter(write(tmp_path / f"{program}.safetensors", deltas, rename, ends))
        assert_equal(read_changes(file, layers), deltas)
        assert file.warnings == (), program


def test_reads_lycoris_and_old_attention_processors(
    deltas: dict[str, Delta], layers: dict[str, Layer], tmp_path: Path
) -> None:
    chosen = {name: delta for name, delta in deltas.items() if re.search(r"attn1\.to_|self_attn", name)}

    def rename(name: str) -> str:
        name = re.sub(r"self_attn\.(q|k|v|out)_proj", r"self_attn.to_\1", name)
        return name.replace("attn1.to_", "attn1.processor.to_").replace("to_out.0", "to_out")

    path = write(tmp_path / "a.safetensors", chosen, rename, ("_lora.down.weight", "_lora.up.weight"))
    assert_equal(read_changes(open_adapter(path), layers), chosen)
    unet = {name: delta for name, delta in deltas.items() if name.startswith("unet.")}
    path = write(tmp_path / "a.safetensors", unet, lambda name: prefixes("lycoris.", "", "")(name).replace(".", "_"))
    assert_equal(read_changes(open_adapter(path), layers), unet)


def test_upsampler_of_a_block_without_attention() -> None:
    """Stable Diffusion 1 has one. OneTrainer numbers it like those of blocks with attention."""
    modules = [f"down_blocks.0.resnets.{index}.conv1" for index in range(2)] + ["up_blocks.0.upsamplers.0.conv"]
    names = LayerNames(Layer(f"unet.{module}", (8, 8, 3, 3), "unet", module) for module in modules)
    for key in ("output_blocks.2.1.conv", "output_blocks.2.2.conv", "output_blocks_2_1_conv"):
        found = names.find(f"lora_unet_{key}")
        assert found is not None and found.module == "unet.up_blocks.0.upsamplers.0.conv", key


def test_reads_files_of_reports(layers: dict[str, Layer]) -> None:
    for case, count, scale in (
        *(("comfy", 6, 0.5), ("integer-alpha", 4, 0.5), ("lycoris", 4, 0.5)),
        *(("onetrainer", 6, 0.5), ("diffusers", 4, 1)),
    ):
        factors = read_changes(open_adapter(CASES / f"lora-{case}.safetensors"), layers)
        assert len(factors) == count and {entry.scale for entry in factors.values()} == {scale}, case


def test_reads_alpha_of_every_type(written: Path, layers: dict[str, Layer]) -> None:
    tensors = load_file(written)
    names = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float64")
    for index, name in enumerate(names):
        alpha = torch.full(((), (1,), (1, 1))[index % 3], 2).to(getattr(torch, name))
        save_file(
            {key: alpha.clone() if key.endswith(".alpha") else tensor for key, tensor in tensors.items()}, written
        )
        assert {entry.scale for entry in read_changes(open_adapter(written), layers).values()} == {0.5}, name


def test_refuses_alpha(written: Path, layers: dict[str, Layer]) -> None:
    tensors = load_file(written)
    for alpha, message in (
        (torch.tensor(True), "alpha' is BOOL, expected F16, BF16, F32, F64, I8, .* U32 or U64"),
        (torch.tensor([2, 2]), "invalid alpha"),
        (torch.tensor(2**62), "invalid alpha"),
        (torch.tensor(-(2**62)), "invalid alpha"),
        (torch.tensor([], dtype=torch.int32), "invalid alpha"),
    ):
        save_file(tensors | {f"{ATTENTION}.alpha": alpha}, written)
        with pytest.raises(BadAdapter, match=message):
            read_changes(open_adapter(written), layers)


def write_folder(folder: Path, *names: str) -> Path:
    """Write a folder with files of these names, of which the first has the keys of diffusers."""
    folder.mkdir()
    for index, name in enumerate(names):
        shutil.copy(CASES / ("lora-comfy.safetensors" if index else "lora-diffusers.safetensors"), folder / name)
    return folder


def test_reads_the_file_of_a_folder(layers: dict[str, Layer], tmp_path: Path) -> None:
    for stems in (("pytorch_lora_weights", "b"), ("adapter_model", "b"), ("any",), ("any", ".hidden")):
        folder = write_folder(tmp_path / "-".join(stems), *(f"{stem}.safetensors" for stem in stems))
        assert len(read_changes(open_adapter(folder), layers)) == 4, stems


def test_refuses_folders(tmp_path: Path) -> None:
    both = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
    many = tuple(f"{index}.safetensors" for index in range(9))
    names: tuple[str, ...]
    for number, (names, message) in enumerate(
        (
            (both, "has several files: adapter_model.* Name one"),
            (("a.safetensors", "b.safetensors"), "has several files: a.safetensors, b.safetensors. Name one"),
            (many, "several files: 0.safetensors.* 4.safetensors and 4 more"),
            ((), f"has no safetensors file, such as {both[0]} or {both[1]}"),
            (("pytorch_lora_weights.bin",), "has no safetensors file.* pytorch_lora_weights.bin may hold a pickle"),
        )
    ):
        with pytest.raises(BadAdapter, match=message):
            open_adapter(write_folder(tmp_path / f"{number}", *names))


WRONG_KEYS = {
    "foo.bar.lora_A.weight": f"key format of 'foo.bar.lora_A.weight' is unknown. These formats are read: {FORMATS}",
    "model.layers.0.self_attn.q_proj.lora_A.weight": "key format of 'model.layers.0.* is unknown",
    "text_model.encoder.layers.0.mlp.fc1.lora_A.weight": "key format of 'text_model.* is unknown",
    "lycoris_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": "key format of 'lycoris_text.* is unknown",
    "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight": "no layer for .* is for another model",
    "transformer.transformer_blocks.0.attn.to_q.lora_A.weight": "no layer for .* is for another model",
    "lora_transformer_transformer_blocks_0_attn_to_q.lora_down.weight": "no layer for .* is for another model",
    "lora_te3_encoder_block_0_layer_0_SelfAttention_k.lora_down.weight": "no layer for .* is for another model",
    "input_blocks.99.1.proj_in.lora_down.weight": "no layer for .* is for another model",
    "diffusion_model.input_blocks.3.1.proj_in.diff_b": "difference of its bias, and this model's layer has none",
    "unet.conv_in.lora_B.bias": "conv_in has a bias of a LoRA, and no LoRA",
    "conditioner.embedders.0.weight": "key format of 'conditioner.* is unknown",
    "bundle_embeddings": "key format of 'bundle_embeddings' is unknown",
}


def test_names_what_is_wrong_with_a_key(layers: dict[str, Layer], tmp_path: Path) -> None:
    for key, message in WRONG_KEYS.items():
        save_file({key: torch.zeros(4, 4)}, tmp_path / "a.safetensors")
        with pytest.raises(BadAdapter, match=message):
            read_changes(open_adapter(tmp_path / "a.safetensors"), layers)


def test_refuses_two_spellings_of_a_layer(written: Path, layers: dict[str, Layer]) -> None:
    tensors = load_file(written)
    for stem in (ATTENTION.replace(".", "_"), f"lora_{ATTENTION}", ATTENTION.removeprefix("unet.")):
        save_file(tensors | {f"{stem}.lora_A.weight": torch.zeros(4, 96)}, written)
        with pytest.raises(BadAdapter, match=f"{ATTENTION} has two tensors 'down'"):
            read_changes(open_adapter(written), layers)


def test_leaves_out_bundled_embeddings(layers: dict[str, Layer], tmp_path: Path) -> None:
    tensors = load_file(CASES / "lora-bundled-embedding.safetensors")
    plain = {key: tensor for key, tensor in tensors.items() if not key.startswith("bundle_emb.")}
    save_file(plain, tmp_path / "plain.safetensors")
    others = ("a.b.clip_l_out", "web.string_to_param.*", "params.emb_params", "x\x1b[31m.clip_g")
    more = {f"bundle_emb.{name}": torch.ones(1, 4, dtype=torch.bool) for name in others}
    save_file(tensors | more, tmp_path / "bundle.safetensors")
    file = open_adapter(tmp_path / "bundle.safetensors")
    expected = read_changes(open_adapter(tmp_path / "plain.safetensors"), layers)
    assert read_changes(file, layers).keys() == expected.keys()
    [warning] = file.left_out
    assert file.warnings == () and "preheat add-lora" in warning and "\x1b" not in warning
    assert all(name in warning for name in ("myface", "a.b", "web", "params"))
    save_file({"bundle_emb.myface.clip_l": torch.zeros(1, 4)}, tmp_path / "a.safetensors")
    with pytest.raises(BadAdapter, match=r"has only embeddings \(myface\)"):
        open_adapter(tmp_path / "a.safetensors")


def test_build_names_what_a_merge_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = CASES / "lora-bundled-embedding.safetensors"
    assert "myface" in read_merge(Checkpoint(MODEL_FOLDER), [(bundle, 1.0)]).warnings[0]
    parse_plan(str(MODEL_FOLDER), name="merged", loras=[f"{bundle}:0.5"])
    output = " ".join(capsys.readouterr().out.split())
    assert "warning" in output and "embeddings, which were left out: myface" in output


def test_peft_file_without_options_warns(written: Path, layers: dict[str, Layer]) -> None:
    tensors = {key: tensor for key, tensor in load_file(written).items() if not key.endswith(".alpha")}
    save_file({f"base_model.model.{key}": tensor for key, tensor in tensors.items()}, written)
    file = open_adapter(written)
    assert {entry.scale for entry in read_changes(file, layers).values()} == {1}
    assert "adapter_config.json, which PEFT writes next to it, is missing" in file.warnings[0]
    written.with_name("adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    file = open_adapter(written)
    assert {entry.scale for entry in read_changes(file, layers).values()} == {2} and file.warnings == ()


def test_500_damaged_adapters_are_refused_by_name(tmp_path: Path) -> None:
    """Each change of a file is either harmless or refused, before anything reaches a device."""
    shapes, networks = module_shapes(MODEL_FOLDER, vectors=True), Reference(MODEL_FOLDER).networks
    layers = {name: Layer(name, shape, name.partition(".")[0], name) for name, shape in shapes.items()}
    changed = re.compile(r"unet\.mid_block\..*(attn1\.to_q|ff\.net\.0\.proj|resnets\.0\.(conv1|norm1))|unet\.conv_in")
    whole = {
        name: load_file(LycorisAdapter(networks, changed, name, seed=1).write(tmp_path / f"{name}.safetensors"))
        for name in ALGORITHMS
    }
    damages: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
        "without": lambda tensor: None,
        "cut off": lambda tensor: tensor[..., :-1] if tensor.ndim else tensor.expand(3).clone(),
        "doubled": lambda tensor: torch.cat([tensor, tensor]) if tensor.ndim else tensor * torch.nan,
        "turned": lambda tensor: tensor.T if tensor.ndim == 2 else tensor.flatten(),
        "of another type": lambda tensor: tensor.to(torch.int32) if tensor.ndim else tensor.bool(),
        "not a number": lambda tensor: tensor.float() * torch.nan,
        "empty": lambda tensor: tensor.flatten()[:0],
        "of another algorithm": lambda tensor: tensor,
    }
    generator, refused = random.Random(0), 0
    for number in range(500):
        name, damage = generator.choice(list(whole)), list(damages)[number % len(damages)]
        tensors = dict(whole[name])
        key = generator.choice(sorted(tensors))
        if damage == "of another algorithm":
            stem = key.rpartition(".")[0]
            other = whole[generator.choice(list(whole))]
            tensors |= {k: t for k, t in other.items() if k.startswith(key.partition(".")[0]) and k not in tensors}
            tensors[f"{stem}.{generator.choice(['lora_up.weight', 'hada_w1_a', 'lokr_w1', 'x'])}"] = tensors[key]
        elif (made := damages[damage](tensors.pop(key))) is not None:
            tensors[key] = made
        path = tmp_path / "damaged.safetensors"
        save_file({k: tensor.clone().contiguous() for k, tensor in tensors.items()}, path)
        if number % 10 == 9:
            path.write_bytes(path.read_bytes()[: generator.randrange(path.stat().st_size)])
        try:
            read_changes(open_adapter(path), layers)
        except BadAdapter as error:
            refused += 1
            assert str(path) in str(error) and error.remedy, (name, damage, key)
    assert refused > 350  # an alpha may be missing, a whole number or of another shape
