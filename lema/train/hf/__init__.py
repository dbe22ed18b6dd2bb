"""Other people's trainers: a streamed model that is a PEFT model to them, and a mixin for their
training steps. docs/trainers.md describes the folder."""
