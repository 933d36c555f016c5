"""Sources of rows: datasets, files, tables, partitions, streams.

:class:`RowSource` is what a loader needs of a source. Sources whose rows come in units
(:class:`UnitSource`: Parquet, Arrow, Dask) share :class:`WindowedRows`; sources of unknown length
(:class:`StreamSource`), :class:`StreamRows`.
"""
