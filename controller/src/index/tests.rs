//! The index as its callers see it: scenarios, and properties over random histories.
