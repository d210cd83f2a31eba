// The API key of this tab. It is kept in session storage, which ends with the tab, and nowhere else.

const name = document.body.classList.contains('page-ops') ? 'ephemeral-admin-key' : 'ephemeral-key';

export const getKey = () => sessionStorage.getItem(name) ?? '';
export const setKey = (key) => sessionStorage.setItem(name, key);
export const dropKey = () => sessionStorage.removeItem(name);
