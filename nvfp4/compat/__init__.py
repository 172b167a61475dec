"""Other libraries' functions under their own names, with this package's arithmetic behind them."""
