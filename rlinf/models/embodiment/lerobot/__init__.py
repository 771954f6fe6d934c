"""Policies of lerobot. Importing this package is cheap."""

from rlinf.models import ModelEntry

FOLDER = "rlinf.models.embodiment.lerobot"

LEROBOT = ModelEntry(
    "lerobot",
    f"{FOLDER}.policy:LerobotPolicy",
    f"{FOLDER}.config:LerobotConfig",
    load_processor=f"{FOLDER}.policy:load_processor",
    folder_settings=f"{FOLDER}.config:settings_of",
)

SMOLVLA = ModelEntry(
    "smolvla",
    f"{FOLDER}.smolvla:SmolVLAPolicy",
    f"{FOLDER}.smolvla:SmolVLAConfig",
    load_processor=f"{FOLDER}.policy:load_processor",
)

GROOT = ModelEntry(
    "groot",
    f"{FOLDER}.smolvla:GrootPolicy",
    f"{FOLDER}.smolvla:GrootConfig",
    load_processor=f"{FOLDER}.policy:load_processor",
)
