"""FIX-B as a chat model: its folder with a chat template."""

from __future__ import annotations

from pathlib import Path

from fixtures import FIX_B, write_folder, write_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}: {{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)


def write_fix_b(folder: Path, **changes: object) -> Path:
    """Write the folder; ``changes`` replace fields of its config.json. Returns ``folder``."""
    write_folder(folder, FIX_B, **changes)
    write_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    return folder
