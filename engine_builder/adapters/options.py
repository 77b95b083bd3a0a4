"""PEFT's options of an adapter: which of them are read, and the rank and alpha that they state for each layer.

PEFT writes them into `adapter_config.json`, for the model that it wrapped. diffusers writes them into the header of its
file, where their names begin with a component ("unet.r"), and gives each component its own options.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from engine_builder.adapters.bad_adapter import BadAdapter
from engine_builder.adapters.patterns import BadPattern, Matches, Scope, match_scopes
from model.pipeline.spec import TEXT_ENCODER, UNET
from model.store.manifest_json import printable

READ, NO_EFFECT = "read", "no effect"
PEFT_OPTIONS = {
    **dict.fromkeys(("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "init_lora_weights"), READ),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"), READ),
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"), NO_EFFECT),
    **dict.fromkeys(("inference_mode", "lora_dropout", "runtime_config", "megatron_core"), NO_EFFECT),
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"), NO_EFFECT),
    **dict.fromkeys(("alpha", "use_dora", "use_rslora", "lora_bias"), READ),
    **dict.fromkeys(("init_weights", "rank_dropout", "rank_dropout_scale", "module_dropout"), NO_EFFECT),
    **dict.fromkeys(("use_effective_conv2d", "decompose_both", "decompose_factor"), NO_EFFECT),  # the shapes tell
    "fan_in_fan_out": "transposed weights",
    "bias": "trained biases",
    "modules_to_save": "modules that are stored in full",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "a LoRA of parameters that are not a module's weight",
    "layer_replication": "repeated layers",
    "ensure_weight_tying": "tied weights",
    "megatron_config": "Megatron's layers",
    "alora_invocation_tokens": "Activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "Arrow",
}
"""Each option of PEFT's LoraConfig, LoHaConfig and LoKrConfig -> READ, NO_EFFECT on a trained adapter, or the kind of
adapter that it makes."""

_DEFAULTS: tuple[object, ...] = (None, False, [], "none")  # of the options that make another kind of adapter
# Values of `init_lora_weights` that leave the model's own weights as they are. Others are PiSSA, OLoRA and so on.
_INITIALISATIONS: tuple[object, ...] = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_MOST_RANK = 2**20  # of options; `read_change` has the limit of a change
_KINDS = ("LORA", "LOHA", "LOKR")
_DEFAULT_ALPHA = 8  # of their configs


@dataclass(frozen=True)
class PeftOptions:
    """The options of a file. by_component: their names begin with a component (diffusers)."""

    values: Mapping[str, Any]
    by_component: bool


@dataclass(frozen=True)
class Module:
    """A layer as the options name it, see `stated_scales`. component: "" for a key without one."""

    component: str
    name: str


@dataclass(frozen=True)
class Stated:
    """The values that the options state for a layer; None: they state none.

    is_rank_stabilized: the scale is alpha / sqrt(rank) (rsLoRA). is_decomposed: DoRA.
    """

    rank: int | None = None
    alpha: float | None = None
    is_rank_stabilized: bool = False
    is_decomposed: bool = False


def parse_options(text: str, where: str, by_component: bool) -> PeftOptions:
    """Parse options. Raises BadAdapter if they are not a JSON object."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadAdapter(f"{where}: the options of PEFT are not JSON.") from error
    if not isinstance(values, dict):
        raise BadAdapter(f"{where}: the options of PEFT are not a JSON object.")
    return PeftOptions(values, by_component)


def check_options(options: PeftOptions, where: str) -> list[str]:
    """Return a warning for each unknown option. Raises BadAdapter if the options make another kind of adapter."""
    warnings = {}
    for key, value in options.values.items():
        option = printable(key.rpartition(".")[2] if options.by_component else key)
        meaning = PEFT_OPTIONS.get(option)
        kind = None
        if meaning is None:
            if isinstance(value, list | dict) and value or value is True:
                kind = "something unknown"
            elif value:
                warnings[option] = f"{where}: PEFT's option {option} ({_shown(value)}) is unknown and was not read."
        elif option == "peft_type":
            kind = None if value in (None, *_KINDS) else str(value)
        elif option == "init_lora_weights":
            name = value.lower() if isinstance(value, str) else value
            kind = None if name in _INITIALISATIONS else f"a change of the model's own weights ({value})"
        elif meaning not in (READ, NO_EFFECT):
            kind = None if value in _DEFAULTS else meaning
        if kind is not None:
            raise BadAdapter(
                f"{where} is no adapter that can be used: PEFT's option {option} states {_shown(kind)}, which is not "
                "supported."
            )
        if key == f"{TEXT_ENCODER}.alpha_pattern" and options.by_component and "text_model" in str(value):
            warnings[key] = (
                f"{where}: PEFT's option {key} names text_model. Like diffusers, Preheat matches it with the names of "
                "transformers 5, where the modules of this text encoder begin with encoder."
            )
    return list(warnings.values())


def stated_scales(options: PeftOptions, modules: Mapping[str, Module], where: str) -> dict[str, Stated]:
    """Return layer -> what the options state, by PEFT's rules: the first pattern that matches wins.

    modules: layer -> how the options name it: with the names in the key for options of PEFT's folder, and with
    diffusers' names of the component's modules for others. A CLIP without projection has no `text_model` in them since
    transformers 5. Raises BadAdapter.
    """
    groups: dict[str, dict[str, str]] = {}
    for layer, module in modules.items():
        groups.setdefault(module.component if options.by_component else "", {})[layer] = module.name
    scopes = {component: _scope(options, component, where) for component in groups}
    stated = {}
    matched = _match({component: (scopes[component], groups[component]) for component in groups}, options, where)
    for component, layers in groups.items():
        values, matches = scopes[component], matched[component]
        if matches["left_out"]:
            raise BadAdapter(
                f"{where}: PEFT's options of target_modules and layers leave out {matches['left_out'][0]}, which has "
                "tensors."
            )
        for layer, rank, alpha in zip(layers, matches["rank_pattern"], matches["alpha_pattern"], strict=True):
            stated[layer] = _stated(values, rank, alpha, f"{where}: {layer}")
    return stated


def _scope(options: PeftOptions, component: str, where: str) -> dict[str, Any]:
    """Return the options of a component ("" for keys without one), by their own names."""
    bare = {key: value for key, value in options.values.items() if "." not in key}
    if not options.by_component:
        return dict(options.values)
    prefix = f"{component or UNET}."
    own = {key.removeprefix(prefix): value for key, value in options.values.items() if key.startswith(prefix)}
    if bare and component and not own:
        raise BadAdapter(f"{where}: PEFT's options in the header do not name a component ({prefix}r), and the keys do.")
    return bare if bare and not component else own


def _match(
    groups: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]], options: PeftOptions, where: str
) -> dict[str, Matches]:
    """Match the patterns of all components at once."""
    scopes: list[Scope] = []
    for component, (values, layers) in groups.items():
        # diffusers takes the UNet's layers from the keys, and the text encoders' from the options.
        selects = not options.by_component or component not in ("", UNET)
        scopes.append(
            {
                "names": list(layers.values()),
                "rank_pattern": _patterns(values, "rank_pattern", where),
                "alpha_pattern": _patterns(values, "alpha_pattern", where),
                "target_modules": _modules(values, "target_modules", component, where) if selects else None,
                "exclude_modules": _modules(values, "exclude_modules", component, where) if selects else None,
                "layers_to_transform": _layers(values, where) if selects else None,
                "layers_pattern": _texts(values, "layers_pattern", where) if selects else None,
            }
        )
    if not any(value for scope in scopes for option, value in scope.items() if option != "names"):
        return {
            component: {"rank_pattern": [None] * len(layers), "alpha_pattern": [None] * len(layers), "left_out": []}
            for component, (_, layers) in groups.items()
        }
    try:
        return dict(zip(groups, match_scopes(scopes), strict=True))
    except BadPattern as error:
        raise BadAdapter(f"{where}: PEFT's patterns cannot be evaluated: {error}.") from error


def _stated(values: Mapping[str, Any], rank_key: str | None, alpha_key: str | None, where: str) -> Stated:
    rank = values.get("r") if rank_key is None else values["rank_pattern"][rank_key]
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _MOST_RANK):
        raise BadAdapter(f"{where} has an invalid rank in PEFT's options ({_shown(rank)}).")
    kinds = bool(values.get("use_rslora")), bool(values.get("use_dora"))
    if alpha_key is not None:
        alpha = values["alpha_pattern"][alpha_key]
    else:
        option = next((name for name in ("lora_alpha", "alpha") if name in values), None)
        alpha = values[option] if option else _DEFAULT_ALPHA if "r" in values else None
        if alpha is None and option is None:
            return Stated(rank, None, *kinds)
    if not _is_number(alpha):
        raise BadAdapter(f"{where} has an invalid alpha ({_shown(alpha)}).")
    return Stated(rank, alpha, *kinds)


def _shown(value: object) -> str:
    """Return an untrusted value as text for a message."""
    return printable(str(value)[:80])


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _patterns(values: Mapping[str, Any], option: str, where: str) -> list[str]:
    patterns = values.get(option) or {}
    if not isinstance(patterns, dict):
        raise BadAdapter(f"{where}: PEFT's option {option} is {_shown(patterns)}, expected an object.")
    return list(patterns)


def _texts(values: Mapping[str, Any], option: str, where: str) -> list[str] | str | None:
    value = values.get(option)
    if not (value is None or isinstance(value, str) or _is_list(value, str)):
        raise BadAdapter(f"{where}: PEFT's option {option} is {_shown(value)}, expected names or a pattern.")
    return value


def _modules(values: Mapping[str, Any], option: str, component: str, where: str) -> list[str] | str | None:
    """Return names of modules, for the first text encoder as transformers 5 has them."""
    value = _texts(values, option, where)
    return [diffusers_name(component, name) for name in value] if isinstance(value, list) else value


def _layers(values: Mapping[str, Any], where: str) -> list[int] | int | None:
    value = values.get("layers_to_transform")
    if not (value is None or isinstance(value, int) or _is_list(value, int)):
        raise BadAdapter(f"{where}: PEFT's option layers_to_transform is {_shown(value)}, expected numbers.")
    return value


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def diffusers_name(component: str, module: str) -> str:
    """Return a layer's name in the component that diffusers loads."""
    return module.removeprefix("text_model.") if component == TEXT_ENCODER else module
