"""ComfyUI's graph of a picture. Nodes of known meaning are translated; a note names all others before the sampler."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Any

from model.denoising.sampler_specs import SPECS
from preheat.image_texts.fields import Translation

_MAX_NODES = 2_000
_SAMPLER = "KSampler"  # the beginning of the names of nodes that sample from both prompts
_FIELDS = {"steps": "num_inference_steps", "cfg": "guidance_scale", "seed": "seed", "noise_seed": "seed"}
# Inputs of a sampler -> what they are in a picture that is made from noise in all steps.
_WHOLE_RUN = {"denoise": (1,), "start_at_step": (0,), "add_noise": ("enable",)}
_TEXTS = {"CLIPTextEncode": ("text",), "CLIPTextEncodeSDXL": ("text_g", "text_l")}
_NO_TEXT = "ConditioningZeroOut"
_LORA, _LORA_OF_UNET = "LoraLoader", "LoraLoaderModelOnly"
_LATENTS = ("EmptyLatentImage", "EmptySD3LatentImage")
_FILES = ("CheckpointLoaderSimple", "CheckpointLoader", "UNETLoader", "CLIPLoader", "DualCLIPLoader", "VAELoader")
_PLAIN = ("Reroute",)  # passes its only input on
# Inputs by which a node that only states a value does so, and others that it may have.
_VALUES = ("value", "seed", "int", "float", "number", "text", "string")
_NEUTRAL = ("control_after_generate", "multiline")


@dataclass(frozen=True)
class _Node:
    key: str
    kind: str
    inputs: Mapping[str, Any]


def translate(graph: Mapping[str, Any]) -> Translation:
    """Return the request of the graph's first pass. Raises ValueError for a graph without a KSampler."""
    nodes = {
        key: _Node(key, str(node.get("class_type")), node["inputs"])
        for key, node in graph.items()
        if isinstance(node, dict) and isinstance(node.get("inputs"), dict)
    }
    samplers = [node for node in nodes.values() if node.kind.startswith(_SAMPLER) and "positive" in node.inputs]
    if not samplers or len(nodes) > _MAX_NODES:
        raise ValueError("its graph has no KSampler")
    reader = _Reader(nodes)

    def is_first(sampler: _Node) -> bool:
        before = reader.upstream(sampler.inputs.get("latent_image"))
        return not any(node.kind.startswith(_SAMPLER) for node in before)

    sampler = next(filter(is_first, samplers), samplers[0])
    reader.read(sampler)
    if len(samplers) > 1:
        reader.found.notes.append(
            f"The graph has {len(samplers)} samplers. Only the first pass is translated: node {sampler.key}."
        )
    return reader.found


class _Reader:
    """Reads a sampler and what its inputs lead to."""

    def __init__(self, nodes: Mapping[str, _Node]) -> None:
        self.found = Translation()
        self._nodes = nodes
        self._understood = set[str]()

    def read(self, sampler: _Node) -> None:
        """Translate a sampler and the nodes before it."""
        inputs, fields = sampler.inputs, self.found.fields
        self._understood.add(sampler.key)
        self.found.set_prompts(*(self._text(inputs.get(name), name) for name in ("positive", "negative")))
        for name, field in _FIELDS.items():
            if name in inputs and isinstance(value := self._value(inputs[name]), int | float):
                fields[field] = value
            elif name in inputs:
                self.found.notes.append(f"Not translated: {name}, which another node computes.")
        self._read_latent(self._node(inputs.get("latent_image")))
        name, schedule = str(self._value(inputs.get("sampler_name"))), str(self._value(inputs.get("scheduler")))
        served = [
            one.name
            for one in SPECS.values()
            if name in one.comfy and schedule == ("karras" if one.karras else "normal")
        ]
        self.found.set_sampler(f"{name} {schedule}", served[0] if served else None)
        self._read_loras(self._node(inputs.get("model")))
        left = [
            f"{name} {self._value(inputs[name])}"
            for name, whole in _WHOLE_RUN.items()
            if name in inputs and self._value(inputs[name]) not in whole
        ]
        end, steps = self._value(inputs.get("end_at_step")), self._value(inputs.get("steps"))
        if isinstance(end, int) and isinstance(steps, int) and end < steps:
            left.append(f"end_at_step {end}")
        others = {
            node.kind: None
            for link in inputs.values()
            for node in self.upstream(link)
            if node.key not in self._understood and node.kind not in _FILES
        }
        if left or others:
            self.found.notes.append(f"Not translated: {', '.join([*left, *others])}.")

    def upstream(self, link: Any) -> Iterator[_Node]:
        """Yield the nodes that a link [node, output] leads to, nearest first; none before a node without text."""
        waiting, seen = [link], set[str]()
        while waiting:
            node = self._node(waiting.pop(0))
            if node is not None and node.key not in seen:
                seen.add(node.key)
                yield node
                waiting += node.inputs.values() if node.kind != _NO_TEXT else ()

    def _node(self, link: Any) -> _Node | None:
        """Return the node of a link, behind those that only pass it on. None: it is a value, or there is no such."""
        for _ in self._nodes:
            node = self._nodes.get(str(link[0])) if isinstance(link, list) and link else None
            if node is None or node.kind not in _PLAIN:
                return node
            link = next(iter(node.inputs.values()), None)
        return None

    def _value(self, given: Any) -> str | int | float | None:
        """Return a value, also of a node that only states it; None for what other nodes compute."""
        seen = set[str]()
        while (node := self._node(given)) is not None and node.key not in seen:
            seen.add(node.key)
            stated = [name for name in node.inputs if name not in _NEUTRAL]
            given = node.inputs[stated[0]] if len(stated) == 1 and stated[0] in _VALUES else None
        if isinstance(given, str | int | float) and not isinstance(given, bool):
            self._understood |= seen
            return given
        return None

    def _text(self, link: Any, role: str) -> str:
        """Return the text that a link of conditioning leads to. `role`: positive or negative."""
        seen = set[str]()
        while (node := self._node(link)) is not None and node.key not in seen:
            seen.add(node.key)
            if node.kind == _NO_TEXT:
                self._understood.add(node.key)
                return ""
            if node.kind in _TEXTS:
                return self._encoded_text(node)
            # Of a node that passes conditioning on, which is not translated: the input of this prompt.
            link = node.inputs.get(role)
            if isinstance(link, str):
                return _plain_brackets(link)
            if self._node(link) is None:
                link = next((one for one in node.inputs.values() if self._leads_to_text(one)), None)
        return ""

    def _leads_to_text(self, link: Any) -> bool:
        return any(node.kind in (*_TEXTS, _NO_TEXT) for node in self.upstream(link))

    def _encoded_text(self, node: _Node) -> str:
        texts = [self._value(node.inputs.get(name)) for name in _TEXTS[node.kind]]
        if not all(isinstance(text, str) for text in texts):
            self.found.notes.append(f"Not translated: a prompt of {node.kind}, which another node computes.")
            return ""
        self._understood.add(node.key)
        if len(set(texts)) > 1:
            self.found.notes.append(f"Not translated: {texts[1]!r}, a text for one of the text encoders.")
        return _plain_brackets(str(texts[0]))

    def _read_latent(self, node: _Node | None) -> None:
        if node is None or node.kind not in _LATENTS:
            return
        self._understood.add(node.key)
        for name in ("width", "height"):
            if isinstance(side := self._value(node.inputs.get(name)), int):
                self.found.fields[name] = side
        if (batch := self._value(node.inputs.get("batch_size"))) not in (None, 1):
            self.found.notes.append(f"Not translated: batch_size {batch}; `num_images` makes several images.")

    def _read_loras(self, node: _Node | None) -> None:
        seen = set[str]()
        while node is not None and node.key not in seen:
            seen.add(node.key)
            if node.kind in (_LORA, _LORA_OF_UNET):
                name = self._value(node.inputs.get("lora_name"))
                unet = self._value(node.inputs.get("strength_model"))
                text = self._value(node.inputs.get("strength_clip")) if node.kind == _LORA else 0
                if isinstance(name, str) and isinstance(unet, int | float) and isinstance(text, int | float):
                    self._understood.add(node.key)
                    self.found.add_lora(PureWindowsPath(name).stem, unet, text)
            node = self._node(node.inputs.get("model"))


def _plain_brackets(text: str) -> str:
    """Return a text of ComfyUI in A1111's syntax, where brackets would lower the weight of words."""
    return re.sub(r"(?<!\\)[\[\]]", r"\\\g<0>", text.strip())
