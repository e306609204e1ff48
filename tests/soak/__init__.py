"""Random load for as long as asked, on stage E or on the server in front of it: answers, blocks, memory."""
