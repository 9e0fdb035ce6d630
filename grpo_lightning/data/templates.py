"""Prompt templates: an optional system prompt, an optional question template, and the choice between chat and text.

The system prompt and the question template can be given by name. The folder `prompts` has one file per name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from grpo_lightning.core.log_messages import nearest
from grpo_lightning.core.types import Message
from grpo_lightning.policy.encoder import check_template_settings

PromptAs = Literal["auto", "text", "chat"]

SHIPPED = Path(__file__).parent / "prompts"
QUESTION = re.compile(r"\{question\}|\{Question\}")
"""The placeholder of the question; capitalized in VLM-R1's templates."""


@dataclass(frozen=True)
class Original:
    """A prompt of another RL library, and the name of the shipped prompt with the same instructions."""

    ours: str
    """Name of the shipped equivalent."""

    source: str
    """The library, and the location of the text in it."""

    words: str
    """The text, with "..." for omissions."""


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
"""Prompts of other libraries, by kind and by their name in the other library."""

TASKS: dict[str, dict[str, str]] = {
    "question": {
        "think_answer": "tags_only",
        "od_length": "tags_before",
        "ovd": "tags_boxes",
        "counting": "tags_number",
    },
    "system": {},
}
"""Hints for error messages, by kind. They map a name that users may try to the shipped prompt for the same task."""

LONGEST_NAME = 255
"""Maximum length of a file name in bytes."""


@dataclass(frozen=True)
class PromptTemplate:
    """Rendering of a row's text as a prompt."""

    system_prompt: str | None = None
    """System message for every chat that has no system message: a text, a file (`.txt`, `.md`), or a shipped name
    (`tags`, `gsm8k_xml`)."""

    question_template: str | None = None
    """Template for every question that is text: a text with `{question}`, a file, or a shipped name (`tags`,
    `tags_only`, `tags_json`, `tags_json_example`, `tags_before`, `tags_boxes`, `tags_number`). The shipped templates
    are worded differently from those of other libraries. To use another library's template, give it as a file."""

    prompt_as: PromptAs = "auto"
    """Form of prompts that are text. `text`: the text is tokenized as it is. `chat`: the text becomes a user turn.
    `auto`: like `text` if the text is in the column `prompt`, the row has no images, and `system_prompt` is None.
    Otherwise, `auto` is like `chat`."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the chat template of every prompt, for example `enable_thinking: false`."""

    def __post_init__(self) -> None:
        """Read files and shipped texts.

        Raises:
            ValueError: If a value is out of range, a name is unknown, or `{question}` is missing.
            FileNotFoundError: If a file does not exist.
        """
        if self.prompt_as not in get_args(PromptAs):
            raise ValueError(f"prompt_as must be one of {', '.join(get_args(PromptAs))}, got {self.prompt_as!r}.")
        if self.prompt_as == "text" and self.system_prompt is not None:
            raise ValueError("system_prompt needs a chat, but prompt_as is 'text': set it to 'auto' or 'chat'.")
        check_template_settings(self.chat_template_kwargs)
        for name in ("system_prompt", "question_template"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, named_text(value, kind=name.split("_")[0], key=name))
        if self.question_template is not None and not QUESTION.search(self.question_template):
            raise ValueError(f"question_template must contain {{question}}, got {self.question_template!r:.80}.")

    def question(self, text: str) -> str:
        """Insert a question into the template. Other braces in template and question are kept."""
        return text if self.question_template is None else QUESTION.sub(lambda _: text, self.question_template)

    def render(self, content: str | Sequence[Message], *, is_question: bool, where: str) -> str | list[Message]:
        """Render the text or messages for the tokenizer.

        Raises:
            ValueError: If `content` is messages, but a question template is set or `prompt_as` is "text".
        """
        if not isinstance(content, str):
            return self._render_chat(content, where)
        text = self.question(content)
        is_chat = (
            is_question or self.system_prompt is not None if self.prompt_as == "auto" else self.prompt_as == "chat"
        )
        return self.with_system([{"role": "user", "content": text}]) if is_chat else text

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """Prepend the system prompt, unless the messages start with a system or developer message."""
        if self.system_prompt is None or messages[0]["role"] in ("system", "developer"):
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _render_chat(self, messages: Sequence[Message], where: str) -> list[Message]:
        """Prepend the system prompt. Raises: ValueError with a question template, or if `prompt_as` is "text"."""
        if self.question_template is not None:
            raise ValueError(
                f"{where}: question_template is for questions that are text, but the row is a list of messages. Remove "
                "the template, or write it into the messages."
            )
        if self.prompt_as == "text":
            raise ValueError(f"{where}: the row is a list of messages, but prompt_as is 'text'. Set it to 'auto'.")
        return self.with_system(messages)


def shipped_names(kind: str) -> list[str]:
    """The names of the shipped texts of a kind: "system" or "question"."""
    return sorted(path.stem for path in (SHIPPED / kind).glob("*.txt"))


def named_text(value: str, *, kind: str, key: str) -> str:
    """The text for a setting.

    `value` is the name of a shipped text, the path of a file, or the text itself.

    Raises:
        ValueError: If `value` is empty, or looks like a name (`r2`) but no shipped text or file has this name.
        FileNotFoundError: If `value` looks like the path of a file that does not exist.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a non-empty text, a file or a shipped name, got {value!r:.80}.")
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
                f"{key} {value!r} is a text of {original.source}, which is not shipped: {original.words!r}. To use its "
                f"words, write them into a file: {key}: my_{value}.txt. The shipped {original.ours!r} has the same "
                f"instructions in other words: {ours!r}. A model trained with one of them may answer worse when "
                "prompted with the other."
            )
        near = nearest(value, shipped_names(kind), n=1, cutoff=0.5)
        likely = TASKS[kind].get(value) or next(iter(near), None)
        raise ValueError(
            f"{key} {value!r} is not a shipped text{f', did you mean {likely!r}?' if likely else '.'} The shipped ones "
            f"are: {', '.join(shipped_names(kind))}. Use one of them, a file, or a text of more than one word."
        )
    return path.read_text(encoding="utf-8").removesuffix("\n")


def _is_file_name(value: str) -> bool:
    """True for a single line that ends in `.txt` or `.md`."""
    is_short = len(value) < 1000 and all(len(part.encode()) <= LONGEST_NAME for part in value.split("/"))
    return value.endswith((".txt", ".md")) and len(value.splitlines()) == 1 and is_short


def _is_word(value: str) -> bool:
    """True if the value looks like a name or a path.

    Non-ASCII text is excluded, because in some languages whole texts have no spaces.
    """
    is_short = len(value) <= LONGEST_NAME and value.isascii() and re.search(r"\s", value) is None
    return is_short and ("/" in value or re.fullmatch(r"[\w.-]*[\w-]", value) is not None)
