"""What plugin authors test with: tiny checkpoints, fakes and a contract kit per kind of driver."""
