"""What a user pins before the search: read, checked against what is offered, applied."""
