"""Sources of rows: datasets, files, partitions, streams.

:class:`RowSource` is what a loader needs of a source. Sources whose rows come in units
(:class:`UnitSource`: Parquet, Dask) share :class:`WindowedRows`; sources of unknown length
(:class:`StreamSource`), :class:`StreamRows`.
"""
