"""Hidden states that go through layers in chunks of their sequence, of which only a few chunks are
on the device."""
