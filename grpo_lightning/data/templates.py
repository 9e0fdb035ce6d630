"""Prompt templates: a system prompt, a question template and a chat turn around a question.

Both texts may be given by the name of a shipped one, a file of the folder `prompts/system` or `prompts/question`: a new
file there is a new name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from grpo_lightning.core.types import Message
from grpo_lightning.policy.encoder import check_template_settings

PromptAs = Literal["auto", "text", "chat"]

SHIPPED = Path(__file__).parent / "prompts"
QUESTION = re.compile(r"\{question\}|\{Question\}")
"""The place of the question; with a capital letter in VLM-R1's templates."""


@dataclass(frozen=True)
class Original:
    """A text of another trainer, which is not shipped: a shipped one asks for the same in other words."""

    ours: str
    """The name of the shipped one."""

    source: str
    """The trainer, and where its text is."""

    words: str
    """How it reads, "..." for what is left out."""


_IN_VLM_R1 = "VLM-R1 (get_question_template of its vlm_modules)"
_TAGS = (
    "{Question} First output the thinking process in <think> </think> tags and then output the final answer in "
    "<answer> </answer> tags."
)
_MIND = "First thinks about the reasoning process in the mind and then provides the user with the answer. ..."
ORIGINALS = {
    "question": {
        "default": Original("tags", _IN_VLM_R1, _TAGS),
        "rec": Original("tags_json", _IN_VLM_R1, f"{_TAGS} Output the final answer in JSON format."),
        "ic": Original(
            "tags_json_example", _IN_VLM_R1, f"{{Question}} {_MIND} <answer> json format answer here </answer>"
        ),
        "odLength": Original("tags_before", _IN_VLM_R1, f"{_MIND} <answer> answer here </answer>\n{{Question}}"),
    },
    "system": {
        "r1": Original(
            "tags",
            "ms-swift (examples/train/grpo/prompt.txt)",
            "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. ...",
        ),
    },
}
"""Texts of other trainers by kind and name: not these words, so not this name."""

TASKS: dict[str, dict[str, str]] = {
    "question": {
        "think_answer": "tags_only",
        "od_length": "tags_before",
        "ovd": "tags_boxes",
        "counting": "tags_number",
    },
    "system": {},
}
"""Shipped texts by the task that they are for."""

LONGEST_NAME = 255
"""Bytes that a name in a folder may have. Asking a file system for a longer one is an error."""


@dataclass(frozen=True)
class PromptTemplate:
    """How the text of a row becomes a prompt."""

    system_prompt: str | None = None
    """Put in front of every chat that has none of its own: a text, a file (`.txt`, `.md`), or a shipped name
    (`tags`, `gsm8k_xml`)."""

    question_template: str | None = None
    """Put around every question that is text: a text with `{question}`, a file, or a shipped name (`tags`, `tags_only`,
    `tags_json`, `tags_json_example`, `tags_before`, `tags_boxes`, `tags_number`). The words are not those of other
    trainers: a template of theirs goes in as a file."""

    prompt_as: PromptAs = "auto"
    """`text`: the tokenizer sees the text as it is. `chat`: it becomes a user turn. `auto`: the column `prompt` stays
    text unless there is a system prompt; other columns hold a question to somebody and become a user turn."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the chat template of every prompt (`enable_thinking: false`)."""

    def __post_init__(self) -> None:
        """Read files and shipped texts.

        Raises:
            ValueError: If a value is out of range, a name is unknown, or `{question}` is missing.
            FileNotFoundError: If a file is not there.
        """
        if self.prompt_as not in get_args(PromptAs):
            raise ValueError(f"prompt_as must be one of {', '.join(get_args(PromptAs))}, got {self.prompt_as!r}.")
        if self.prompt_as == "text" and self.system_prompt is not None:
            raise ValueError("system_prompt needs a chat to stand in: set prompt_as to 'auto' or 'chat'.")
        check_template_settings(self.chat_template_kwargs)
        for name in ("system_prompt", "question_template"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, named_text(value, kind=name.split("_")[0], key=name))
        if self.question_template is not None and not QUESTION.search(self.question_template):
            raise ValueError(f"question_template must contain {{question}}, got {self.question_template!r:.80}.")

    def question(self, text: str) -> str:
        """The text with the question template around it. Other braces in template and text stay as they are."""
        return text if self.question_template is None else QUESTION.sub(lambda _: text, self.question_template)

    def render(self, content: str | Sequence[Message], *, is_question: bool, where: str) -> str | list[Message]:
        """The text or messages given to the tokenizer.

        Args:
            content: Text, or messages.
            is_question: True for text that is asked of somebody (`question`), False for text to go on with (`prompt`).
            where: The row, for error messages.

        Raises:
            ValueError: If messages meet a question template, or are to be text.
        """
        if not isinstance(content, str):
            return self._render_chat(content, where)
        text = self.question(content)
        is_chat = (
            is_question or self.system_prompt is not None if self.prompt_as == "auto" else self.prompt_as == "chat"
        )
        return self.with_system([{"role": "user", "content": text}]) if is_chat else text

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the system prompt in front, unless they begin with one of their own."""
        if self.system_prompt is None or messages[0]["role"] in ("system", "developer"):
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _render_chat(self, messages: Sequence[Message], where: str) -> list[Message]:
        """Messages of the data: their wording is theirs."""
        if self.question_template is not None:
            raise ValueError(
                f"{where}: question_template is put around a question that is text, and the row is a list of messages. "
                "Leave the template out, or write it into the messages."
            )
        if self.prompt_as == "text":
            raise ValueError(
                f"{where}: the row is a list of messages, prompt_as 'text' asks for text. Set it to 'auto'."
            )
        return self.with_system(messages)


def shipped_names(kind: str) -> list[str]:
    """The names of the shipped texts of a kind: "system" or "question"."""
    return sorted(path.stem for path in (SHIPPED / kind).glob("*.txt"))


def named_text(value: str, *, kind: str, key: str) -> str:
    """The text that `value` is, names, or is the file of; without the line end of the file's last line.

    Raises:
        ValueError: If it looks like a name (`r2`) and is no shipped one, or it is that of another trainer's text.
        FileNotFoundError: If it looks like a file and is not there.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be text that is not empty, a file or a shipped name, got {value!r:.80}.")
    path = SHIPPED / kind / f"{value}.txt"
    if value not in shipped_names(kind):
        if QUESTION.search(value) or not (_is_file_name(value) or _is_word(value)):
            return value
        path = Path(value).expanduser()
    if not path.is_file():
        if path.suffix in (".txt", ".md") or "/" in value:
            raise FileNotFoundError(f"{key} {value!r}: no file {path.resolve()}. The current folder is {Path.cwd()}.")
        if original := ORIGINALS[kind].get(value):
            ours = (SHIPPED / kind / f"{original.ours}.txt").read_text(encoding="utf-8").splitlines()[0]
            raise ValueError(
                f"{key} {value!r} is a text of {original.source}, which is not shipped: {original.words!r}. To ask in "
                f"its words, write them into a file: {key}: my_{value}.txt. The shipped {original.ours!r} asks for the "
                f"same in other words: {ours!r}. A model trained with one of them may answer worse when asked "
                "with the other."
            )
        near = difflib.get_close_matches(value, shipped_names(kind), n=1, cutoff=0.5)
        likely = TASKS[kind].get(value) or next(iter(near), None)
        raise ValueError(
            f"{key} {value!r} is no shipped text{f', did you mean {likely!r}?' if likely else '.'} There are: "
            f"{', '.join(shipped_names(kind))}. Give one of them, a file, or a text of more than one word."
        )
    return path.read_text(encoding="utf-8").removesuffix("\n")


def _is_file_name(value: str) -> bool:
    """True for a line that ends like a file with a text; spaces and every script may be in a file's name."""
    is_short = len(value) < 1000 and all(len(part.encode()) <= LONGEST_NAME for part in value.split("/"))
    return value.endswith((".txt", ".md")) and len(value.splitlines()) == 1 and is_short


def _is_word(value: str) -> bool:
    """True for what looks like a name or a path: short ASCII without spaces, with a slash or of letters and digits.

    Languages without spaces write whole texts in one word: what is not ASCII is one.
    """
    is_short = len(value) <= LONGEST_NAME and value.isascii() and re.search(r"\s", value) is None
    return is_short and ("/" in value or re.fullmatch(r"[\w.-]*[\w-]", value) is not None)
