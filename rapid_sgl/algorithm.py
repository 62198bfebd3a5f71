def register() -> None:
    return
