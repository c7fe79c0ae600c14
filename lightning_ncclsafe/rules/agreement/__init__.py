"""Why ranks that present their data could not train together: one cause per file."""

from lightning_ncclsafe.rules.agreement.different_data import different_data
from lightning_ncclsafe.rules.agreement.different_datasets import different_datasets
from lightning_ncclsafe.rules.agreement.different_peers import different_peers
from lightning_ncclsafe.rules.agreement.loader_count import loader_count
from lightning_ncclsafe.rules.agreement.loader_settings import loader_settings
from lightning_ncclsafe.rules.agreement.same_shard import same_shard
from lightning_ncclsafe.rules.agreement.sampler_disagreement import sampler_disagreement
from lightning_ncclsafe.rules.agreement.settings_disagreement import settings_disagreement
from lightning_ncclsafe.rules.agreement.sized_and_unsized import sized_and_unsized
from lightning_ncclsafe.rules.agreement.unequal_batches import unequal_batches
from lightning_ncclsafe.rules.agreement.unequal_samples import unequal_samples
from lightning_ncclsafe.rules.agreement.uneven_end import uneven_end
from lightning_ncclsafe.rules.agreement.unpresented_loader import unpresented_loader
from lightning_ncclsafe.rules.agreement.unreadable_loader import unreadable_loader
from lightning_ncclsafe.rules.agreement.validation_step import validation_step
from lightning_ncclsafe.rules.kit.rule import Rule

# Of presented data; what other findings follow from comes before these.
AGREEMENT_RULES: tuple[Rule, ...] = (
    uneven_end,
    loader_count,
    unpresented_loader,
    sized_and_unsized,
    different_datasets,
    unequal_samples,
    different_data,
    different_peers,
    sampler_disagreement,
    loader_settings,
    validation_step,
    unequal_batches,
    settings_disagreement,
    same_shard,
    unreadable_loader,
)
