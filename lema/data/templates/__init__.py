"""Chat templates that have names: the formats that models were published with."""
