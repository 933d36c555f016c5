"""Elastic training with Lightning: ``Trainer(strategy="nbelastic")``.

Importing this package registers the strategy, for Lightning's Trainer::

    import lightning as L
    import nbelastic.lightning

    trainer = L.Trainer(strategy="nbelastic", max_epochs=3)
    nbelastic.lightning.fit(trainer, module, datamodule=data)
"""

from nbelastic.lightning.fit import ElasticStrategy, fit

__all__ = ["ElasticStrategy", "fit"]
