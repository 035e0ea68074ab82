"""Requests of an event loop to PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from .connect import NOT_READ, Source, driver_of, is_function, postgres_url, psycopg_place
from .deadlines import prepare_async
from .errors import Contention, Outage, Refusal
from .functions import (
    POSTGRES_CHANGES,
    POSTGRES_CLAIM,
    POSTGRES_VERSION,
    change_values,
    check_version,
    claim_values,
    postgres_meaning,
    read_reply,
    text,
)
from .opening import is_permanent
from .protocol import Claim, Granted, Terms, patience


class AsyncSession:
    """Sends requests over a connection that is opened for the first of them, and kept."""

    def __init__(self, source: Source, lease: float) -> None:
        if isinstance(source, str):
            url = postgres_url(source)
            if url is None:
                raise ValueError("rowlock.aio works on PostgreSQL: the URL begins with postgres://")
            source = url
        elif not is_function(source):
            if driver_of(source) != "psycopg":
                raise TypeError(
                    "rowlock.aio works on PostgreSQL: use a connection of psycopg, or a URL"
                )
            source = psycopg_place(source)
        self._source = source
        self._patience = patience(lease)
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def claim(self, terms: Terms, holder: str) -> Granted | Refusal:
        return read_reply(
            terms, holder, await self._run(POSTGRES_CLAIM, claim_values(terms, holder))
        )

    async def change(self, change: str, claim: Claim, *arguments: Any) -> str:
        row = await self._run(POSTGRES_CHANGES[change], change_values(claim, *arguments))
        return text(row[0])

    async def _run(self, sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
        if self._connection is None:
            try:
                self._connection = await self._connect()
            except Exception as error:
                raise Outage(sent=False, permanent=is_permanent(error)) from error
            try:
                check_version(await self._run(POSTGRES_VERSION, ()))
            except BaseException:
                await self.close()
                raise
        try:
            return await self._fetch(self._connection, sql, values)
        except (psycopg.Error, OSError, asyncio.TimeoutError) as error:
            silent = isinstance(error, (OSError, asyncio.TimeoutError))
            meant = Outage(sent=True) if silent else postgres_meaning(error)
            if not isinstance(meant, Contention):
                # The next request may succeed on another one.
                await self.close()
            raise meant from error
        except BaseException:
            await self.close()  # Cancelled: its reply is not read.
            raise

    async def _fetch(
        self, connection: psycopg.AsyncConnection[Any], sql: str, values: tuple[Any, ...]
    ) -> Sequence[Any]:
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(sql, values)
            row: Sequence[Any] | None = await cursor.fetchone()
        assert row is not None
        return row

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        connect = psycopg.AsyncConnection.connect
        connection: psycopg.AsyncConnection[Any]
        if isinstance(self._source, str):
            try:
                connection = await connect(self._source, connect_timeout=5)
            except psycopg.ProgrammingError:  # Its message may have the password.
                raise ValueError(NOT_READ) from None
        elif isinstance(self._source, dict):
            place: dict[str, Any] = {"connect_timeout": 5} | self._source
            connection = await connect(**place)
        else:
            connection = await self._source()
        await prepare_async(connection, self._patience)
        return connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
