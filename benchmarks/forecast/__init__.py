"""Forecasts of the speed on more devices than a run was measured on."""
