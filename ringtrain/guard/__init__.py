"""Guards: what watches over a run and stops it, with a name for what is wrong, before harm is done."""
