"""The other ranks' processes: find them, start them, send them commands, and watch them. See README.md here."""
