"""What ``job`` decorates, and what the result shows of itself."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from string import Formatter
from typing import Any, TypeVar

from .terms import check_key

Run = TypeVar("Run", bound=Callable[..., Any])


def check_work(work: Callable[..., Any], *, awaits: bool) -> None:
    """Raises :class:`TypeError` for a function whose body would run after the key's release."""
    call = work if inspect.isroutine(work) else getattr(work, "__call__", work)  # noqa: B004
    kinds = [(inspect.isgeneratorfunction, "generator"), (inspect.isasyncgenfunction, "generator")]
    if not awaits:
        kinds.append((inspect.iscoroutinefunction, "coroutine"))
    for is_kind, kind in kinds:
        if is_kind(work) or is_kind(call):
            raise TypeError(
                f"{_name(work)} is a {kind}: its body runs after its call has returned, and so "
                "after the release. Use rowlock.aio.job for coroutines, and a block for generators"
            )
    if awaits and not inspect.iscoroutinefunction(work) and not inspect.iscoroutinefunction(call):
        raise TypeError(f"{_name(work)} is not a coroutine function: use rowlock.job")
    if next(iter(_parameters(work)), "") in ("self", "cls"):
        raise TypeError(
            f"{_name(work)} is a method: decorate a function that calls it, since the lease is "
            "the first argument"
        )


def shown_as(run: Run, work: Callable[..., Any]) -> Run:
    """Gives the name and the signature of the work, without the lease, which no caller passes."""
    functools.update_wrapper(run, work)
    lease = next(iter(_parameters(work)), None)
    annotations = getattr(work, "__annotations__", {})
    run.__annotations__ = {name: kind for name, kind in annotations.items() if name != lease}
    try:
        signature = inspect.signature(work)
    except ValueError:  # Of a function in C.
        return run
    kept = list(signature.parameters.values())
    if kept and kept[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        del kept[0]
    run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return run


class KeyOf:
    """The key of a call: a text with arguments of the call in braces, as ``report-{date}``."""

    def __init__(self, key: str) -> None:
        check_key(key)
        self._key = key
        try:
            fields = list(Formatter().parse(key))
            names = [name for _, name, _, _ in fields if name is not None]
            self._names = {re.split(r"[.\[]", name)[0] for name in names}
            #: A key of this form, in which the arguments are not known.
            self.example = "".join(
                text + ("x" if name is not None else "") for text, name, _, _ in fields
            )
        except ValueError as error:
            raise ValueError(
                f"key {key[:80]!r} is not valid: {error}; a brace is doubled"
            ) from None

    def check(self, work: Callable[..., Any]) -> None:
        """Raises :class:`ValueError` for a name that is no parameter of the function."""
        unknown = self._names - set(_parameters(work)[1:])
        if unknown:
            named = ", ".join(sorted(unknown)) or "{}"
            raise ValueError(
                f"key {self._key[:80]!r} is not valid: {_name(work)} has no parameter {named}"
            )

    def __call__(
        self, work: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> str:
        if not self._names:
            return self._key.format()
        bound = inspect.signature(work).bind(None, *arguments, **named)
        bound.apply_defaults()
        return self._key.format(**bound.arguments)


def _parameters(work: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(work).parameters)
    except ValueError:
        return []


def _name(work: Callable[..., Any]) -> str:
    return getattr(work, "__qualname__", repr(work))
