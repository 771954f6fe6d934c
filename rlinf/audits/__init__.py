"""Audits of policies."""
