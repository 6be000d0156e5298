"""Buckets, through Arrow's file systems: ``arrow`` for any of them, ``s3`` for S3 and what speaks its protocol."""
