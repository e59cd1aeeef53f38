"""What several tests stand on: ranks on loopback, emulated hosts."""
