"""Getting into a Megatron program: what is wrapped, and proof that training calls it.

seams.py         the names that are wrapped, and why; are they still?
install.py       `install`; `provider` and `extra_args_provider`, for scripts that are edited
calls.py         proof that training calls what is wrapped
call_errors.py   what it says otherwise
"""
