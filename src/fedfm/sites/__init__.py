"""The sites wing: programs and files at an organisation, and at the server between organisations.

The silo's own file, its identity, its ledger and what it agrees to; kits and the certificate authority; the processes
of a kit; the folder that carries messages. The trunk imports nothing from here: it finds the commands by
:mod:`fedfm.api.command_registry`, and a silo's file by :mod:`fedfm.runtime.site_policy`.
"""
