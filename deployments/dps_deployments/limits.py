"""Bounds on what one request may bring, checked before anything is made of it."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dps_deployments.refusals import RefusalError, bad_request
from dps_deployments.requests import READ_HEADERS

CHARS_PER_TOKEN = 16
"""A prompt of more characters than this for each token of the context is not even tokenised."""
MEDIA = frozenset(
    ("image_url", "image_embeds", "input_audio", "audio_url", "audio_embeds", "video_url")
)
"""Parts of a message that no text is made of."""
SERVE_HEADERS = frozenset((b"x-request-disconnect-disabled", b"x-request-timeout-seconds"))
"""With these Serve would let a request outlive its client and the operator's bounds."""
BESIDE_MESSAGES = ("tools", "documents", "chat_template", "chat_template_kwargs")
"""What a chat's template makes a prompt of, besides messages."""

Count = Annotated[int, Field(ge=1)]


class RequestTooLargeError(RefusalError):
    """The body has more bytes than one request may bring."""


class HeadersTooLargeError(RefusalError):
    """There are too many headers, or too long ones."""


class RequestLimits(BaseModel):
    """``args.limits`` of a fleet's application. Every refusal names the field, value and limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: Count = 8 * 2**20
    """Size of a body, bytes, whether or not its length is told before. Images in chat messages may
    need more."""
    max_body_s: Annotated[float, Field(gt=0.0)] = 60.0
    """Time for a body to arrive, seconds."""
    max_headers: Count = 100
    max_header_bytes: Count = 16384
    """Names and values of all headers together."""
    max_value_chars: Count = 256
    """Length of each header that the fleet reads itself, such as ``X-DPS-Session``."""
    max_prompts: Count = 64
    """Prompts in one request."""
    max_choices: Count = 128
    """Prompts times ``n``."""
    min_priority: Annotated[int, Field(ge=-(2**63), le=0)] = -(2**63)
    """Most urgent priority a request may claim, lower is sooner. Urgent requests go before all
    others for as long as there are any: bound it where clients are not trusted with that."""
    max_prompt_tokens: Count | None = None
    """Tokens of a prompt that is given as tokens. Default: the engine's ``max_model_len`` where the
    config gives it."""
    max_prompt_chars: Count | None = None
    """Characters of a prompt, or of a chat's messages and tools together: of all their names and
    values, but not of images and sounds. Default: 16 for each of ``max_prompt_tokens``; the engine
    counts the tokens of what is shorter."""

    def for_context(self, max_model_len: Any) -> "RequestLimits":
        """These limits with the defaults that follow from the engine's context length."""
        tokens = self.max_prompt_tokens
        if tokens is None and isinstance(max_model_len, int) and max_model_len > 0:
            tokens = max_model_len
        chars = self.max_prompt_chars
        if chars is None and tokens is not None:
            chars = CHARS_PER_TOKEN * tokens
        return self.model_copy(update={"max_prompt_tokens": tokens, "max_prompt_chars": chars})

    def check_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse too many headers, too long ones, and any the fleet reads that is given twice.

        Raises
        ------
        HeadersTooLargeError
            With status 431.
        BadRequestError
            A header that may stand once stands twice, or one of Serve's own is given.
        """
        count = size = 0
        seen: set[bytes] = set()
        for name, value in headers:
            count, size = count + 1, size + len(name) + len(value)
            key = name.lower()
            shown = name.decode("latin-1")
            if key in SERVE_HEADERS:
                raise bad_request(
                    f"header {shown} is not for clients: leave it out; args.request_timeout_s "
                    "bounds a request, and one whose client has left is ended"
                )
            if key not in READ_HEADERS:
                continue
            if key in seen:
                raise bad_request(f"header {shown} is given twice: give it once")
            seen.add(key)
            if len(value) > self.max_value_chars:
                raise _headers_too_large(
                    f"header {shown} has {len(value)} characters: at most {self.max_value_chars} "
                    "(limits.max_value_chars)"
                )
        if count > self.max_headers:
            raise _headers_too_large(
                f"the request has {count} headers: at most {self.max_headers} (limits.max_headers)"
            )
        if size > self.max_header_bytes:
            raise _headers_too_large(
                f"the headers have {size} bytes: at most {self.max_header_bytes} "
                "(limits.max_header_bytes)"
            )

    def check_body_size(self, size: int, *, whole: bool) -> None:
        """Refuse a body of ``size`` bytes; without ``whole`` that is what has arrived so far.

        Raises
        ------
        RequestTooLargeError
            With status 413.
        """
        if size > self.max_body_bytes:
            raise RequestTooLargeError(
                f"the body has {'' if whole else 'more than '}"
                f"{size if whole else self.max_body_bytes} bytes: at most {self.max_body_bytes} "
                "(limits.max_body_bytes)",
                413,
            )

    def check_prompts(self, body: Any) -> None:
        """Refuse prompts that are too many or cannot fit the context, before they are tokenised.

        Raises
        ------
        BadRequestError
            With the field, its value and the limit.
        """
        prompts = 1
        for field in ("prompt", "input", "tokens"):
            pieces = _pieces(getattr(body, field, None))
            prompts = max(prompts, len(pieces))
            if len(pieces) > self.max_prompts:
                raise bad_request(
                    f"{field} holds {len(pieces)} prompts: at most {self.max_prompts} "
                    "(limits.max_prompts)"
                )
            for index, piece in enumerate(pieces):
                self._check_length(f"{field}.{index}" if len(pieces) > 1 else field, piece)
        messages = getattr(body, "messages", None)
        if messages is not None:
            _materialise(messages)
            chars = _chars_in(messages, MEDIA)
            chars += sum(_chars_in(getattr(body, field, None)) for field in BESIDE_MESSAGES)
            self._check_chars("messages with tools", chars)
        choices = prompts * (getattr(body, "n", None) or 1)
        if choices > self.max_choices:
            raise bad_request(
                f"n asks for {choices} answers ({prompts} prompts): at most {self.max_choices} "
                "(limits.max_choices)"
            )

    def _check_length(self, where: str, prompt: Any) -> None:
        if isinstance(prompt, str):
            self._check_chars(where, len(prompt))
            return
        limit = self.max_prompt_tokens
        if isinstance(prompt, list) and limit is not None and len(prompt) > limit:
            raise bad_request(
                f"{where} has {len(prompt)} tokens: at most {limit} (limits.max_prompt_tokens)"
            )

    def _check_chars(self, where: str, chars: int) -> None:
        if self.max_prompt_chars is not None and chars > self.max_prompt_chars:
            raise bad_request(
                f"{where} has {chars} characters: at most {self.max_prompt_chars} "
                "(limits.max_prompt_chars)"
            )


def _headers_too_large(message: str) -> HeadersTooLargeError:
    return HeadersTooLargeError(message, 431)


def _pieces(value: Any) -> list[Any]:
    """The prompts in a field: one text, one list of tokens, or several of either."""
    if value is None:
        return []
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return value
    return [value]


def _materialise(messages: Iterable[Any]) -> None:
    """Make lists of what pydantic has left to be validated, once, while it is iterated."""
    for index, message in enumerate(messages):
        if not isinstance(message, MutableMapping):
            continue
        for name, value in message.items():
            if isinstance(value, Iterator):
                try:
                    message[name] = list(value)
                except ValidationError as error:
                    fault = error.errors()[0]
                    raise bad_request(
                        f"messages.{index}.{name} is wrong: {fault['msg']} at {fault['loc']}"
                    ) from None


def _chars_in(root: Any, but: frozenset[str] = frozenset()) -> int:
    """Characters of all names and values at any depth, but not of what those names stand for."""
    chars, left = 0, [root]
    while left:
        value = left.pop()
        if isinstance(value, BaseModel):
            value = value.model_dump()
        if isinstance(value, Mapping):
            chars += sum(map(len, value))
            left.extend(inner for name, inner in value.items() if name not in but)
        elif isinstance(value, list):
            left.extend(value)
        elif value is not None:
            chars += len(str(value))
    return chars
