"""Settings that change while the daemon runs: of logs, of tenants, and of agents by their names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kvxfer.control import schema
from kvxfer.control.agents.agent_errors import AgentGone, CallRefused
from kvxfer.control.agents.agent_settings import AgentSettings
from kvxfer.control.agents.agent_view import AgentView
from kvxfer.control.agents.attached import Attached
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.store import Store

_KIND: Final = "settings"


class LiveSettings:
    """Holds the settings, stores them, and applies them."""

    def __init__(
        self,
        store: Store,
        agents: AgentView,
        note: Callable[[str, dict[str, Any]], None],
        set_quotas: Callable[[Iterable[str], Mapping[str, int]], None],
        set_rates: Callable[[Mapping[str, int]], None],
    ) -> None:
        self._store = store
        self._agents = agents
        self._note = note
        self._set_quotas = set_quotas
        self._set_rates = set_rates
        kept = store.load(_KIND, _setting)
        self._log_level: str = kept.get("log_level", "info")
        self._quotas: dict[str, int] = kept.get("page_quotas_nbytes", {})
        self._rates: dict[str, int] = kept.get("tenant_bytes_per_s", {})
        set_rates(self._rates)
        self._of_agents = AgentSettings(kept.get("agents", {}))
        self._agents_log_level: dict[str, str] = {}
        self._refused: dict[
            str, str
        ] = {}  # by incarnation: why the agent has refused the settings of its name
        self._changing = asyncio.Lock()
        self._take_effect(())

    def shown(self, tenants: frozenset[str] | None = None) -> schema.Settings:
        """Returns the current settings; with tenants, only what is set for these."""
        if tenants is not None:
            return schema.Settings.model_validate(
                {
                    "log_level": self._log_level,
                    "agents_log_level": {},
                    "page_quotas_nbytes": {key: n for key, n in self._quotas.items() if key in tenants},
                    "tenant_bytes_per_s": {key: n for key, n in self._rates.items() if key in tenants},
                }
            )
        attached = self._agents.attached
        levels = {id_: level for id_, level in self._agents_log_level.items() if id_ in attached}
        self._refused = {id_: words for id_, words in self._refused.items() if id_ in attached}
        refused: dict[str, dict[str, str]] = {}
        for id_, words in self._refused.items():
            refused.setdefault(attached[id_].name, {})[id_] = words
        agents = {
            name: {**kept, "refused": refused.get(name, {})} for name, kept in self._of_agents.all.items()
        }
        return schema.Settings.model_validate(
            {
                "log_level": self._log_level,
                "agents_log_level": levels,
                "page_quotas_nbytes": self._quotas,
                "tenant_bytes_per_s": self._rates,
                "agents": agents,
            }
        )

    async def change(self, asked: schema.SettingsChange) -> schema.Settings:
        """Changes the settings that are named. If an agent refuses, earlier changes of the same call stay.

        Raises
        ------
        Refusal
            An agent refused, or is not attached; with its words.
        """
        async with self._changing:  # what a change leaves out must not be that of before another change
            return await self._change(asked)

    async def _change(self, asked: schema.SettingsChange) -> schema.Settings:
        before = tuple(self._quotas)
        quotas = _changed(self._quotas, asked.page_quotas_nbytes)
        rates = _changed(self._rates, asked.tenant_bytes_per_s)
        level = asked.log_level or self._log_level
        if quotas != self._quotas:
            await self._store.put(_KIND, "page_quotas_nbytes", quotas)
            self._quotas = quotas
        if rates != self._rates:
            await self._store.put(_KIND, "tenant_bytes_per_s", rates)
            self._rates = rates
            self._set_rates(rates)
        if level != self._log_level:
            await self._store.put(_KIND, "log_level", level)
            self._log_level = level
        self._take_effect(before)
        await self._set_levels(asked.agents_log_level or {})
        for name, change in (asked.agents or {}).items():
            await self._set_agent(name, change)
        self._note("settings.changed", asked.model_dump(exclude_none=True))
        return self.shown()

    async def tell_new(self, agent: Attached) -> None:
        """Sends an agent that has attached the settings of its name; the agent may be a new process."""
        async with self._changing:
            args = self._of_agents.arguments_of_new(agent.name)
            if args is None:
                return
            try:
                await self._tell(agent, args)
            except Refusal as error:
                self._refused[agent.incarnation] = error.detail
                self._note(
                    "settings.refused", {"agent": agent.incarnation, "name": agent.name, "why": error.detail}
                )

    async def _set_levels(self, levels: Mapping[str, str]) -> None:
        agents = [(self._agents.find(name), level) for name, level in levels.items()]
        told = await asyncio.gather(
            *(self._tell(agent, {"log_level": level}) for agent, level in agents), return_exceptions=True
        )
        for (agent, level), error in zip(agents, told, strict=True):
            if isinstance(error, BaseException):
                raise error
            self._agents_log_level[agent.incarnation] = level

    async def _set_agent(self, name: str, change: schema.AgentSettingsChange | None) -> None:
        """Changes all agents of a name, or the one of an id; keeps the change when all have obeyed."""
        agents = self._agents.some(name)
        name = agents[0].name if agents else name
        if not agents and name not in self._of_agents.all:
            raise Refusal("not-found", f"no agent {name!r} is attached, and no settings are kept for it")
        args, changed = self._of_agents.arguments_of(name, change), self._of_agents.changed(name, change)
        agents = self._agents.some(name)
        told = await asyncio.gather(*(self._tell(agent, args) for agent in agents), return_exceptions=True)
        for agent, error in zip(agents, told, strict=True):
            if isinstance(error, BaseException):
                raise error
            self._refused.pop(agent.incarnation, None)
        await self._store.put(_KIND, "agents", changed)
        self._of_agents = AgentSettings(changed)

    async def _tell(self, agent: Attached, args: Mapping[str, Any]) -> None:
        try:
            await self._agents.call(agent, "settings.set", args)
        except CallRefused as error:
            raise Refusal(error.code, f"{agent.name}: {error.words}") from None
        except (AgentGone, TimeoutError):
            raise Refusal("unavailable", f"{agent.name} did not answer") from None

    def take_effect(self) -> None:
        """Applies the settings to parts that were added after the start."""
        self._take_effect(())

    def _take_effect(self, before: Iterable[str]) -> None:
        logging.getLogger("kvxfer").setLevel(self._log_level.upper())
        self._set_quotas(before, self._quotas)


def _setting(id_: str, told: Any) -> Any:
    """Checks a kept setting."""
    if id_ == "agents":
        for each in told.values():
            schema.AgentSettings.model_validate(each)
    elif id_ == "log_level":
        logging.getLevelNamesMapping()[told.upper()]
    elif not all(isinstance(n, int) for n in told.values()):
        raise TypeError("it does not have a number for each tenant")
    return told


def _changed(kept: Mapping[str, int], change: Mapping[str, int | None] | None) -> dict[str, int]:
    """Returns the kept numbers by tenant after a change; None removes one."""
    told = {**kept, **(change or {})}
    return {tenant: number for tenant, number in told.items() if number is not None}
