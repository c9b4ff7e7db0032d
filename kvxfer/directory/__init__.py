"""Directories, in which agents find each other by name."""

from kvxfer.directory.change import Change, ChangeKind
from kvxfer.directory.entry import Entry
from kvxfer.directory.in_process import InProcessDirectory
from kvxfer.directory.protocol import Directory

__all__ = ["Change", "ChangeKind", "Directory", "Entry", "InProcessDirectory"]
