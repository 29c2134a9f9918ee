"""A worker without a model: real control path, memory that is only booked, times from a profile. No torch."""
