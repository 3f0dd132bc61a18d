# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Classes that states name, to which modules of a user add their own."""

from typing import Any

from energon_ext.errors import ConfigError


class Registry(dict[str, Any]):
    """Classes by name; a taken name is refused, since states contain it.

    Args:
        what: what the classes are, for messages.
        base: their base class; None for any callable.

    Example:
        >>> packers = Registry("packer", object, bin=dict)
        >>> packers["bin"] = list
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: packer 'bin': the name is taken; choose another one.
    """

    def __init__(self, what: str, base: type | None, **classes: Any):
        super().__init__(classes)
        self._what, self._base = what, base

    def __setitem__(self, name: str, added: Any) -> None:
        if name in self:
            raise ConfigError(f"{self._what} {name!r}: the name is taken; choose another one.")
        base = self._base
        if not (callable(added) if base is None else isinstance(added, type)):
            raise ConfigError(f"{self._what} {name!r}: {added!r:.80} found, a class is needed.")
        if base is not None and not issubclass(added, base):
            raise ConfigError(f"{self._what} {name!r}: a subclass of {base.__name__} is needed.")
        super().__setitem__(name, added)
