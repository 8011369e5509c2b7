"""The same plan at reduced sizes and on shorter mesh axes."""
