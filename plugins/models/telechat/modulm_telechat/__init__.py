"""TeleChat 1 and 2, Tele-FLM for modulm."""
