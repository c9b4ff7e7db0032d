"""Settings that change while the daemon runs: levels of logs, and quotas of pages.

Nothing else is settable, since nothing else has a mechanism: transfers have no rate limits, priorities stand
in each transfer's request, and rails are what agents' options say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kvxfer.control import schema
from kvxfer.control.agent_errors import AgentGone, CallRefused
from kvxfer.control.agent_view import AgentView
from kvxfer.control.problems import Refusal
from kvxfer.control.state.store import Store

_KIND: Final = "settings"


class LiveSettings:
    """Holds them, keeps them, and has them take effect."""

    def __init__(
        self,
        store: Store,
        agents: AgentView,
        note: Callable[[str, dict[str, Any]], None],
        set_quotas: Callable[[Iterable[str], Mapping[str, int]], None],
    ) -> None:
        self._store = store
        self._agents = agents
        self._note = note
        self._set_quotas = set_quotas
        kept = store.load(_KIND)
        self._log_level: str = kept.get("log_level", "info")
        self._quotas: dict[str, int] = kept.get("page_quotas_nbytes", {})
        self._agents_log_level: dict[str, str] = {}
        self._take_effect(())

    def shown(self) -> schema.Settings:
        """Returns them as they are."""
        attached = self._agents.attached
        levels = {id_: level for id_, level in self._agents_log_level.items() if id_ in attached}
        return schema.Settings.model_validate(
            {
                "log_level": self._log_level,
                "agents_log_level": levels,
                "page_quotas_nbytes": self._quotas,
            }
        )

    async def change(self, asked: schema.SettingsChange) -> schema.Settings:
        """Changes what is named. Where an agent refuses, what comes before it stays changed.

        Raises
        ------
        Refusal
            An agent refused, or is not there: its words.
        """
        before = tuple(self._quotas)
        quotas = dict(self._quotas)
        for tenant, nbytes in (asked.page_quotas_nbytes or {}).items():
            if nbytes is None:
                quotas.pop(tenant, None)
            else:
                quotas[tenant] = nbytes
        level = asked.log_level or self._log_level
        if quotas != self._quotas:
            await self._store.put(_KIND, "page_quotas_nbytes", quotas)
            self._quotas = quotas
        if level != self._log_level:
            await self._store.put(_KIND, "log_level", level)
            self._log_level = level
        self._take_effect(before)
        await self._tell_agents(asked.agents_log_level or {})
        self._note("settings.changed", asked.model_dump(exclude_none=True))
        return self.shown()

    async def _tell_agents(self, levels: Mapping[str, str]) -> None:
        agents = [(self._agents.find(name), level) for name, level in levels.items()]
        calls = (self._agents.call(agent, "settings.set", {"log_level": level}) for agent, level in agents)
        for (agent, level), told in zip(
            agents, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(told, CallRefused):
                raise Refusal(told.code, f"{agent.name}: {told.words}")
            if isinstance(told, AgentGone | TimeoutError):
                raise Refusal("unavailable", f"{agent.name} did not answer")
            if isinstance(told, BaseException):
                raise told
            self._agents_log_level[agent.incarnation] = level

    def take_effect(self) -> None:
        """Has them take effect on what was added since."""
        self._take_effect(())

    def _take_effect(self, before: Iterable[str]) -> None:
        logging.getLogger("kvxfer").setLevel(self._log_level.upper())
        self._set_quotas(before, self._quotas)
