"""Corrections from published training steps: rates by software, and error bands of whole steps."""
