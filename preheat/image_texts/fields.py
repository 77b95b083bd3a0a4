"""What the texts of all programs have in common: fields of a request, and notes about what they leave out."""

import re
from dataclasses import dataclass, field
from typing import Any

from model.denoising.sampler_specs import SPECS

_OTHER_SYNTAX = re.compile(r"\bBREAK\b|\bAND\b|(?<!\\)\[[^\[\]]*:[^\[\]]*\]|__\w+__|\bembedding:\S+")


@dataclass
class Translation:
    """A request's fields, and notes about what has no counterpart."""

    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set_prompts(self, prompt: str, negative: str) -> None:
        """Set both prompts. Constructs of other programs stay in them as text."""
        if other := _OTHER_SYNTAX.findall(f"{prompt} {negative}"):
            self.notes.append(f"Text here, and not an instruction: {', '.join(dict.fromkeys(other))}.")
        self.fields |= {"prompt": prompt, "prompt_syntax": "weighted"}
        if negative:
            self.fields["negative_prompt"] = negative

    def set_sampler(self, name: str, served: str | None) -> None:
        """Set the sampler. `name`: the program's; `served`: its name here, or None."""
        if served is not None:
            self.fields["scheduler"] = served
        elif name:
            self.notes.append(
                f"The sampler {name} is not served, so the release's own is used. Served: {', '.join(SPECS)}."
            )

    def add_lora(self, name: str, unet: float, text: float) -> None:
        """Add an adapter with its scales of the UNet and of the text encoders."""
        loras = self.fields.setdefault("loras", [])
        if any(one["name"] == name for one in loras):
            self.notes.append(f"The adapter {name} is there twice; only the first is translated.")
            return
        scale = unet if unet == text else {"unet": unet, "text_encoder": text, "text_encoder_2": text}
        loras.append({"name": name, "scale": scale})
