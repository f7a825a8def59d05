"""Special tokens of chat templates: markers that a server takes out of a text, so that one that is left has leaked."""

from __future__ import annotations

import re

#: A special token of any family.
SPECIAL = re.compile(
    r"<\|[A-Za-z_0-9./ -]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<\|\"\|>|<\|?/?turn\|?>|</s>|<(?:eos|bos|pad|unk)>"
    r"|<(?:end|start)_of_turn>|\[/?INST\]|<<SYS>>|\[/?TOOL_(?:CALLS|RESULTS)\]|<\|channel>|<channel\|>",
)
#: One at the end of a text.
AT_END = re.compile(rf"(?:\s*(?:{SPECIAL.pattern}))+\s*\Z")
#: What ends a turn: a model that was trained with it writes it, and where the raw text is kept it is seen.
END_OF_TURN = re.compile(
    r"(?:\s*(?:<\|(?:im_end|eot_id|eom_id|end|call|return|endoftext|end_of_text|user)\|>|</s>|<eos>|<end_of_turn>"
    r"|<turn\|>|<｜end▁of▁sentence｜>|<\|tool_response>))+\s*\Z"
)
#: What opens an assistant's turn.
HEADER = re.compile(
    r"\A\s*(?:<\|im_start\|>assistant\s?\n?|<\|start_header_id\|>assistant<\|end_header_id\|>\s*|<\|turn>model\n"
    r"|<start_of_turn>model\n|<\|assistant\|>\s?|<｜Assistant｜>)"
)
