"""A cost model measured on the machine: real layers, rings and copies, timed and fitted.

`cases` says what is timed, `measuring` runs it, `passes` repeats it within a budget, `fitting`
makes coefficients of it (numpy only), `job` does one after the other, `report` and `picture` show
it, `command` holds the flags.
"""
