"""The sites package: programs and files at an organisation, and at the server that connects organisations.

It contains a silo's own file, its identity, its ledger and its terms; kits, their processes and the certificate
authority; and the folder that carries messages. The packages that every run needs import nothing from here. They find
the commands through :mod:`fedfm.api.command_registry`, and silos' files through :mod:`fedfm.runtime.site_policy`.
"""
