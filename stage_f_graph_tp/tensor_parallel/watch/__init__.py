"""The other ranks' processes: how they are found, started, told what to do, and watched. See the README beside this."""
