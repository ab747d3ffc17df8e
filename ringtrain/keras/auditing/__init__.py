"""Audit of a script's own steps: does each train what one process would train on the whole batch?"""
